"""What `dg scaffold defs arroyo_dagster.ArroyoStateComponent NAME` writes."""

import json
from typing import Any

import dagster as dg
from pydantic import BaseModel, ConfigDict, Field

_HEAD = """\
# Every field: `dg docs serve`, or docs/dagster-configuration.md.
"""


class ArroyoStateParams(BaseModel):
    """The options of `dg scaffold defs arroyo_dagster.ArroyoStateComponent`."""

    model_config = ConfigDict(extra="forbid")

    checkpoint_url: str = Field(
        default="s3://bucket/checkpoints",
        description="The checkpoint URL, in any form that Arroyo takes.",
    )
    mode: str = Field(default="view", description="view or maintain.")
    deployment: str | None = Field(
        default=None, description="Name of this deployment, if one Dagster instance has several."
    )
    arroyo_api_url: str | None = Field(default=None, description="Arroyo's REST API.")


class ArroyoStateScaffolder(dg.Scaffolder[ArroyoStateParams]):
    """Writes a short `defs.yaml`, or a `component.py`."""

    @classmethod
    def get_scaffold_params(cls) -> type[ArroyoStateParams]:
        """Return the model of the command's options."""
        return ArroyoStateParams

    def scaffold(self, request: dg.ScaffoldRequest[ArroyoStateParams]) -> None:
        """Write the file."""
        parameters = request.params.model_dump(exclude_none=True)
        if request.scaffold_format == "python":
            dg.scaffold_component(request)
            return
        text = _yaml(request.type_name, parameters)
        if request.append:
            with request.target_path.open("a") as file:
                file.write(f"---\n{text}")
        else:
            (request.target_path / "defs.yaml").write_text(text)


def _yaml(type_name: str, given: dict[str, Any]) -> str:
    lines = "".join(f"  {name}: {json.dumps(value)}\n" for name, value in given.items())
    others = "".join(
        f"  # {line}\n"
        for line in (
            "running: true  # sensor and schedules are on from the start",
            "delete: true  # with `mode: maintain`, delete old epochs",
            "arroyo_api_url: http://arroyo:5115  # names, lineage and status of Arroyo jobs",
        )
        if line.split(":")[0] not in given
    )
    return f"{_HEAD}type: {type_name}\n\nattributes:\n{lines}{others}"
