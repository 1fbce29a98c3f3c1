"""Classes whose fields come from YAML: a JSON schema that names what is wrong, and errors by line.

Dagster derives a model of YAML from a component's class. In its schema, each field may also be any
text (a template), so no enum is checked and a nested typing error has no name; and the descriptions
of most fields are lost. The models here are stricter: a text counts as a template only if it holds
`{{ … }}`. Dagster resolves the fields as usual.
"""

import re
from collections.abc import Mapping
from types import NoneType
from typing import Annotated, Any, NoReturn, Self, get_args, get_origin

import dagster as dg
from pydantic import (
    BaseModel,
    Field,
    PlainSerializer,
    PrivateAttr,
    ValidationError,
    WrapValidator,
    create_model,
    model_validator,
)

from arroyo_dagster.errors import InputError

_TEMPLATE = re.compile(r"\{\{.*\}\}", re.DOTALL)
_TEMPLATE_SCHEMA = {"type": "string", "pattern": r"\{\{.*\}\}"}
_MODELS: dict[type[BaseModel], type[BaseModel]] = {}
JsonSchema = dict[str, Any]


class YamlModel(dg.Model, dg.Resolvable):
    """A class whose fields come from YAML. Every field has a description."""

    @classmethod
    def model(cls) -> type[BaseModel]:
        """Return the model of the YAML, whose fields may also be templates."""
        if cls not in _MODELS:
            fields: Any = {
                name: (_field_type(field), _field_of(field))
                for name, field in cls.model_fields.items()
            }
            _MODELS[cls] = create_model(
                f"{cls.__name__}Model", __base__=cls._model_base(), __doc__=cls.__doc__, **fields
            )
        return _MODELS[cls]

    @classmethod
    def _model_base(cls) -> type[BaseModel]:
        return dg.Model


class ComponentModel(dg.Model):
    """The YAML of a component. What is wrong in it is kept, for whoever knows the file's lines."""

    _wrong: ValidationError | None = PrivateAttr(None)

    @model_validator(mode="wrap")
    @classmethod
    def keep_errors(cls, value: Any, handler: Any) -> Self:
        """Return a model in any case."""
        try:
            model: Self = handler(value)
        except ValidationError as error:
            model = cls.model_construct()
            model._wrong = error
        return model

    @property
    def wrong(self) -> ValidationError | None:
        """Return what is wrong; None if nothing is."""
        return self._wrong


# ---- the schema ----------------------------------------------------------------------------------


class _OrTemplate:
    """Adds templates to the schema of a field, in a way that keeps errors of other values exact."""

    def __get_pydantic_json_schema__(self, core_schema: Any, handler: Any) -> JsonSchema:
        return or_template(handler(core_schema))


def or_template(schema: JsonSchema) -> JsonSchema:
    """Return the schema of a field that may also be a template."""
    others = [option for option in schema.get("anyOf", [schema]) if option != {"type": "null"}]
    if {"type": "string"} in others or not all(others):
        return schema  # any text, or anything, is allowed anyway
    allowed: list[JsonSchema] = [_TEMPLATE_SCHEMA]
    if {"type": "null"} in schema.get("anyOf", []):
        allowed.insert(0, {"type": "null"})
    strict = others[0] if len(others) == 1 else {"anyOf": others}
    return {"if": {"anyOf": allowed}, "else": strict}


def _template_or(value: Any, handler: Any) -> Any:
    return value if isinstance(value, str) and _TEMPLATE.search(value) else handler(value)


def _as_given(value: Any) -> Any:
    return value


def _field_type(field: Any) -> Any:
    resolver = next((item for item in field.metadata if isinstance(item, dg.Resolver)), None)
    model_type = resolver.model_field_type if resolver is not None else None
    kind = _yaml_type(field.annotation) if model_type is None else model_type
    if field.default is None:
        kind = kind | None
    others = [item for item in field.metadata if not isinstance(item, dg.Resolver)]
    serializer = PlainSerializer(_as_given)
    for annotation in [*others, WrapValidator(_template_or), serializer, _OrTemplate()]:
        kind = Annotated[kind, annotation]
    return kind


def _yaml_type(kind: Any) -> Any:
    if isinstance(kind, type) and issubclass(kind, YamlModel):
        return kind.model()
    nested = [arg for arg in get_args(kind) if isinstance(arg, type) and issubclass(arg, YamlModel)]
    if not nested:
        return kind
    model: Any = nested[0].model()
    return list[model] if get_origin(kind) is list else model | None


def _field_of(field: Any) -> Any:
    texts: dict[str, Any] = {"description": field.description, "examples": field.examples}
    if field.is_required():
        return Field(**texts)
    plain = field.default is None or isinstance(field.default, int | float | str)
    return Field(default=field.default, **texts) if plain else Field(default_factory=dict, **texts)


# ---- what is wrong -------------------------------------------------------------------------------


def refuse(text: str) -> NoReturn:
    """Raise an error that ends with `text` where Dagster prints it: its cause has no stack trace.

    Raises:
        DagsterInvalidDefinitionError: always.
    """
    raise dg.DagsterInvalidDefinitionError("the component is refused") from InputError(text)


def describe_errors(error: ValidationError, model: type[BaseModel], positions: Any) -> str:
    """Return a line for each error: file and line, the field, and what is expected.

    Args:
        model: of the component.
        positions: the source positions of the YAML document, as Dagster keeps them; None = unknown.
    """
    lines = []
    for detail in error.errors():
        path = ["attributes", *detail["loc"]]
        place = "" if positions is None else f"{_position(positions, path)}: "
        lines.append(f"{place}{'.'.join(map(str, path))}: {_message(detail, model)}")
    return "\n".join(lines)


def _position(positions: Any, path: list[Any]) -> str:
    position, _ = positions.lookup_closest_and_path(path, None)
    return str(position)


def _message(error: Mapping[str, Any], model: type[BaseModel]) -> str:
    if error["type"] == "missing":
        return "required"
    if error["type"] != "extra_forbidden":
        text = str(error["msg"]).removeprefix("Value error, ").removeprefix("Input ")
        text = text[:1].lower() + text[1:]
        if error["input"] is None:
            return f"{text}, and is empty: if it names an environment variable, set that variable"
        return text
    names = sorted(_fields_at(model, error["loc"][:-1]))
    return f"there is no such field; {_closest(str(error['loc'][-1]), names)}"


def _closest(name: str, known: list[str]) -> str:
    import difflib

    close = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {close[0]}?" if close else f"the fields are {', '.join(known)}"


def _fields_at(model: type[BaseModel], path: Any) -> Mapping[str, Any]:
    fields = model.model_fields
    for name in path:
        if isinstance(name, int):  # an item of a list has the fields of the list's type
            continue
        kinds = [fields[name].annotation, *get_args(fields[name].annotation)]
        models = [kind for kind in kinds if isinstance(kind, type) and kind is not NoneType]
        fields = next((kind.model_fields for kind in models if issubclass(kind, BaseModel)), {})
    return fields
