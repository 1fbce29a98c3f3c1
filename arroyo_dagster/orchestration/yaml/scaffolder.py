"""What `dg scaffold defs arroyo_dagster.ArroyoStateComponent NAME` writes."""

import json
import textwrap
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar, get_origin

import dagster as dg
from pydantic import BaseModel, ConfigDict, Field

from arroyo_dagster.orchestration.yaml.model import YamlModel

_WIDTH = 96
_HEAD = """\
# The state of the streaming jobs below one checkpoint URL.
# Every field is listed with its default, or with an example if it has none: to set one, remove the
# `#` before its name and before the name of its section. Then run: dg check yaml && dg check defs
"""


class ArroyoStateParams(BaseModel):
    """The options of `dg scaffold defs arroyo_dagster.ArroyoStateComponent`."""

    model_config = ConfigDict(extra="forbid")

    checkpoint_url: str = Field(
        default="s3://bucket/checkpoints",
        description="The checkpoint URL, in any form that Arroyo takes.",
    )
    deployment: str | None = Field(
        default=None, description="Name of this deployment, if one Dagster instance has several."
    )
    catalogue_url: str | None = Field(default=None, description="Where the catalogue is stored.")
    arroyo_api_url: str | None = Field(default=None, description="Arroyo's REST API.")


class ArroyoStateScaffolder(dg.Scaffolder[ArroyoStateParams]):
    """Writes a `defs.yaml` that lists every field, or a `component.py`."""

    component: ClassVar[type[YamlModel]]
    """The component, which sets it: it imports this module."""

    @classmethod
    def get_scaffold_params(cls) -> type[ArroyoStateParams]:
        """Return the model of the command's options."""
        return ArroyoStateParams

    def scaffold(self, request: dg.ScaffoldRequest[ArroyoStateParams]) -> None:
        """Write the file."""
        given = request.params.model_dump(exclude_none=True)
        if request.scaffold_format == "python":
            (request.target_path / "component.py").write_text(_python(given))
            return
        text = format_yaml(request.type_name, self.component, given)
        if request.append:
            with request.target_path.open("a") as file:
                file.write(f"---\n{text}")
        else:
            (request.target_path / "defs.yaml").write_text(text)


def format_yaml(type_name: str, component: type[YamlModel], given: dict[str, Any]) -> str:
    """Return a defs.yaml with the given fields; the others as comments."""
    lines = "\n".join(_fields(component, given, "  "))
    return f"{_HEAD}type: {type_name}\n\nattributes:\n{lines}\n"


def _fields(model: type[YamlModel], given: dict[str, Any], indent: str) -> Iterator[str]:
    # What is given comes first: between comments it would be overlooked.
    for name in sorted(model.model_fields, key=lambda name: name not in given):
        field = model.model_fields[name]
        comment = f"{indent}# "
        yield from textwrap.wrap(
            str(field.description),
            _WIDTH,
            initial_indent=comment,
            subsequent_indent=comment,
            break_long_words=False,
            break_on_hyphens=False,
        )
        section = _section(field.annotation)
        if name in given:
            yield f"{indent}{name}: {json.dumps(given[name])}"
        elif section is not None:
            yield f"{indent}#{name}:"
            lines = _fields(section, {}, f"{indent}  ")
            yield from _item(lines) if get_origin(field.annotation) is list else lines
        else:
            yield f"{indent}#{name}: {_value(field)}"
        if indent == "  ":
            yield ""


def _item(lines: Iterable[str]) -> Iterator[str]:
    """Yield the lines of fields as those of one item of a list."""
    mark = "- "
    for line in lines:
        before, _, text = line.partition("#")
        if text.startswith(" "):
            yield line
        else:
            yield f"{before}#{mark}{text}"
            mark = "  "


def _section(kind: Any) -> type[YamlModel] | None:
    kinds = [kind, *getattr(kind, "__args__", ())]
    return next((k for k in kinds if isinstance(k, type) and issubclass(k, YamlModel)), None)


def _value(field: Any) -> str:
    """The default of a field; an example if there is none, or if it says nothing."""
    plain = isinstance(field.default, bool | int | float | str)
    examples = field.examples or [None]
    return json.dumps(field.default if plain else examples[0], ensure_ascii=False)


def _python(given: dict[str, Any]) -> str:
    arguments = "".join(f"        {name}={value!r},\n" for name, value in given.items())
    return (
        "import dagster as dg\n"
        "from arroyo_dagster import ArroyoStateComponent\n\n\n"
        "@dg.component_instance\n"
        "def load(context: dg.ComponentLoadContext) -> ArroyoStateComponent:\n"
        f"    return ArroyoStateComponent(\n{arguments}    )\n"
    )
