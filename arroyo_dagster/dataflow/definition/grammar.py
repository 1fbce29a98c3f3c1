"""The grammar of SDF's documents, as data, and their JSON Schemas for editors.

The schemas cover shapes, choices of words, and durations. Only the reader checks what relates two
places of a document, such as references and duplicate names.

Source: sdf-states.md 2.1, 2.3, 2.4, 2.9 and 5.1.
"""

from __future__ import annotations

import json
from typing import Any

from arroyo_dagster.dataflow.definition.durations import DURATION_PATTERN
from arroyo_dagster.dataflow.definition.shapes import (
    COUNT,
    FLAG,
    TEXT,
    Anything,
    Both,
    ByName,
    CustomShape,
    Either,
    FieldShape,
    Many,
    MappingShape,
    Named,
    Scalar,
    Variants,
    mapping,
    required,
    schema_of,
)
from arroyo_dagster.dataflow.definition.types import (
    BUILT_IN,
    COLUMN_TYPES,
    KEY_TYPES,
    SCALARS,
    UNSUPPORTED_VALUES,
)
from arroyo_dagster.errors import InputError

DATAFLOW_VERSIONS = ("0.5.0", "0.6.0")
PACKAGE_VERSIONS = ("0.4.0", "0.5.0", "0.6.0")
LEGACY_VERSIONS = ("0.1.0", "0.2.0", "0.3.0", "0.4.0", "0.5.0", "0.6.0")

TRANSFORMS = ("map", "filter", "filter-map", "flat-map")
OPERATORS = (*TRANSFORMS, "assign-key", "assign-timestamp", "update-state", "aggregate", "flush")
PACKAGE_ID = r"^[^/@\s]+/[^/@\s]+@[^/@\s]+$"

KEPT = Anything()
_FILLED = required(Scalar(pattern=r"\S"))
_NAMES = Many(mapping(name=_FILLED))
_DURATION = Scalar(pattern=DURATION_PATTERN)
_Fields = dict[str, Any]
"""Keys as arguments of `mapping`, to share or to change."""
_TYPE_NAME: _Fields = {"type": required(TEXT)}
TYPE, STATES, STEP, TRANSFORM = map(Named, ("type", "states", "step", "transform"))


def _misplaced_ttl(belongs: str) -> FieldShape:
    return FieldShape(shape=KEPT, number="E18", misplaced=belongs)


# ---- types and states: their readers check them and report their own error numbers ---------------

COLUMN = mapping(type=required(Scalar(choices=tuple(COLUMN_TYPES))), convert=TEXT)
COLUMN_NAME = r"^(?!_key$|_updated_at$|_window)(?=[\s\S]*\S)"
_NESTED: _Fields = {"type_name": TEXT, "optional": FLAG}
_ROW: _Fields = {
    **_TYPE_NAME,
    "properties": required(ByName(COLUMN, names=COLUMN_NAME)),
    "ttl": _DURATION,
}
ROW = mapping(**_ROW, **_NESTED)
_SCALAR = Scalar(choices=tuple(SCALARS))
_PRIMITIVE: _Fields = {
    **_TYPE_NAME,
    "ttl": _DURATION,
    "properties": required(
        mapping(value=required(Either((_SCALAR, mapping(type=required(_SCALAR))))))
    ),
}
NOT_KEYS = tuple(sorted((BUILT_IN - {"timestamp"}) - set(KEY_TYPES)))
KEY = mapping(type=required(Scalar(never=NOT_KEYS)))
PLAIN = mapping(
    type=required(Scalar(never=(*UNSUPPORTED_VALUES, "keyed-state", "timestamp"))),
    convert=TEXT,
    ttl=_misplaced_ttl("only an arrow-row or a primitive value takes one"),
    open=True,
)
VALUE = Variants(
    by_type={
        "arrow-row": ROW,
        "primitive": mapping(**_PRIMITIVE, convert=TEXT),
        **dict.fromkeys(SCALARS, mapping(**_TYPE_NAME, ttl=_DURATION, convert=TEXT)),
    },
    otherwise=PLAIN,
)
_KEYED: _Fields = {
    **_TYPE_NAME,
    "properties": required(
        mapping(
            key=required(KEY),
            value=required(VALUE),
            ttl=_misplaced_ttl("it belongs into `value`, beside its `properties`"),
        )
    ),
    "ttl": _misplaced_ttl("it belongs into `properties.value`, beside its `properties`"),
}
REFERENCE = mapping(
    from_=required(Scalar(pattern=r"^[^.]+\.[^.]+$")),
    name=TEXT,
    ttl=_misplaced_ttl("a reference has that of its owner"),
)
SYSTEM = mapping(system=_FILLED, name=TEXT)
_NO_STATE = tuple(sorted(BUILT_IN - {"keyed-state", "timestamp"}))
WAS = Either((TEXT, Many(TEXT)))
NAMED_STATE = mapping(type=required(Scalar(never=_NO_STATE)), properties=KEPT, name=TEXT, was=WAS)
STATE = mapping(**_KEYED, name=TEXT, was=WAS)
TYPED = Variants(by_type={"keyed-state": STATE, "key-value": STATE}, otherwise=NAMED_STATE)
_STATE_ENTRY = Either((TYPED, REFERENCE, SYSTEM))
STATES.shape = Either((ByName(_STATE_ENTRY), Many(_STATE_ENTRY)))

_RENAME = mapping(rename=TEXT)
MEMBER_FIELDS: _Fields = {
    **_NESTED,
    "serialize": _RENAME,
    "deserialize": _RENAME,
    "converter": TEXT,
}
_INNER = required(TYPE)
_MEMBERS = required(ByName(TYPE))
TAGGING = Scalar(choices=("externally-tagged", "untagged"))
_TYPES: dict[str, _Fields] = {
    "object": {**_TYPE_NAME, "properties": _MEMBERS},
    "enum": {**_TYPE_NAME, "oneOf": _MEMBERS, "tagging": TAGGING},
    "list": {**_TYPE_NAME, "items": required(TYPE, also="item")},
    "option": {**_TYPE_NAME, "value": _INNER},
    "key-value": {**_TYPE_NAME, "properties": required(mapping(key=_INNER, value=_INNER))},
    "keyed-state": _KEYED,
    "arrow-row": _ROW,
    "primitive": _PRIMITIVE,
}
TYPE.shape = TYPES = Variants(
    by_type={name: mapping(**{**fields, **MEMBER_FIELDS}) for name, fields in _TYPES.items()},
    otherwise=mapping(type=required(Scalar(nullable=True)), **MEMBER_FIELDS, open=True),
)

# ---- steps, partitions, windows ------------------------------------------------------------------

PARAMETER = Both(
    (
        mapping(
            **_TYPE_NAME, name=TEXT, kind=Scalar(choices=("key", "value")), optional=FLAG, list=FLAG
        ),
        TYPE,
    )
)
_BODY: _Fields = {
    "run": TEXT,
    "lang": TEXT,
    "dependencies": Many(KEPT),
    "states": _NAMES,
    "inputs": Many(PARAMETER),
    "output": PARAMETER,
}
_STEP: _Fields = {**_BODY, "uses": TEXT, "with": KEPT}
_STEPS = Many(TRANSFORM)
_TRANSFORM: _Fields = {"operator": required(Scalar(choices=TRANSFORMS)), **_STEP}
STEP.shape = mapping(**_STEP, one_of=("run", "uses"))
TRANSFORM.shape = mapping(**_TRANSFORM, one_of=("run", "uses"))
PARTITION = mapping(
    assign_key=required(STEP, also="assign_key"),
    transforms=_STEPS,
    update_state=FieldShape(shape=STEP, also="update_state"),
)
_TIME = FieldShape(shape=_DURATION, number="E37")
_REQUIRED_TIME = required(_DURATION, "E37")
TUMBLING = mapping(duration=_REQUIRED_TIME, offset=_TIME)
SLIDING = mapping(duration=_REQUIRED_TIME, slide=_REQUIRED_TIME, offset=_TIME)
WATERMARK = mapping(
    idleness=_TIME,
    grace_period=FieldShape(shape=_DURATION, number="E37", also="grace_period"),
)
WINDOW = mapping(
    tumbling=FieldShape(shape=TUMBLING, number="E37"),
    sliding=FieldShape(shape=SLIDING, number="E37"),
    assign_timestamp=required(STEP, "E37", also="assign_timestamp"),
    watermark=FieldShape(shape=WATERMARK, number="E37"),
    transforms=_STEPS,
    partition=PARTITION,
    flush=STEP,
    apart=("tumbling", "sliding"),
    needed=True,
)

# ---- services, topics, packages ------------------------------------------------------------------


def _endpoint(*kinds: str) -> MappingShape:
    return mapping(type=required(Scalar(choices=kinds)), id=TEXT, transforms=_STEPS)


SERVICE = mapping(
    sources=required(Many(_endpoint("topic", "schedule"), least=1), "E39"),
    sinks=Many(_endpoint("topic", "no-target")),
    states=CustomShape(STATES),
    transforms=_STEPS,
    partition=PARTITION,
    window=WINDOW,
    apart=("partition", "window"),
)
TOPIC = mapping(
    name=TEXT,
    schema=mapping(key=CustomShape(TYPE), value=CustomShape(TYPE), open=True),
    open=True,
)
IMPORT = mapping(
    pkg=required(Scalar(pattern=PACKAGE_ID)),
    path=TEXT,
    types=_NAMES,
    states=_NAMES,
    functions=Many(mapping(name=_FILLED, alias=TEXT)),
)
META = mapping(name=_FILLED, version=_FILLED, namespace=_FILLED)
FUNCTION = mapping(operator=required(Scalar(choices=OPERATORS)), **_BODY)

# ---- tests, an extension: only `sdf check` and `sdf test` read them ------------------------------

_ROWS = ByName(ByName(KEPT))
RECORD = mapping(
    record=KEPT, key=Either((TEXT, COUNT, FLAG)), timestamp=Either((TEXT, COUNT)), closed=True
)
"""A record with its key, its time or both; any other value is a record without them."""
_RECORDS = ByName(Many(Either((CustomShape(RECORD, later=True), KEPT))))
PACKAGE_TEST = mapping(
    name=_FILLED,
    function=_FILLED,
    states=_ROWS,
    value=KEPT,
    key=KEPT,
    state_key=KEPT,
    expect=KEPT,
    expect_states=_ROWS,
    expect_error=TEXT,
    closed=True,
)
DATAFLOW_TEST = mapping(
    name=_FILLED,
    records=Either((_RECORDS, Many(_RECORDS))),
    close_windows=FLAG,
    expect=_RECORDS,
    expect_states=_ROWS,
    expect_failed=ByName(COUNT),
    closed=True,
)


def _root(
    versions: tuple[str, ...], kept: tuple[str, ...], test: MappingShape, **fields: Any
) -> MappingShape:
    sections: _Fields = dict.fromkeys(kept, KEPT)
    sections["tests"] = CustomShape(Many(test), later=True)
    return mapping(
        apiVersion=required(CustomShape(Scalar(choices=versions))),
        meta=required(META),
        imports=Many(IMPORT),
        types=ByName(CustomShape(TYPE)),
        **fields,
        **sections,
    )


KEPT_BY_DATAFLOWS = ("config", "dev", "schedule", "packages", "tests")
KEPT_BY_PACKAGES = ("config", "dev", "tests")
DATAFLOW = _root(
    DATAFLOW_VERSIONS,
    KEPT_BY_DATAFLOWS,
    DATAFLOW_TEST,
    services=required(ByName(SERVICE)),
    topics=ByName(TOPIC),
)
PACKAGE = _root(
    PACKAGE_VERSIONS,
    KEPT_BY_PACKAGES,
    PACKAGE_TEST,
    states=CustomShape(ByName(TYPED)),
    functions=ByName(FUNCTION),
)

# ---- the JSON Schema -----------------------------------------------------------------------------

ROOTS = {"dataflow": DATAFLOW, "sdf-package": PACKAGE}


def schema_text(kind: str) -> str:
    """Return the schema of a kind of document as the text of a file."""
    return json.dumps(json_schema(kind), indent=1, ensure_ascii=False) + "\n"


def json_schema(kind: str) -> dict[str, Any]:
    """Return the schema of a kind of document, in draft 7, which most editors support.

    Args:
        kind: `dataflow` or `sdf-package`.

    Raises:
        InputError: `kind` is unknown.
    """
    if kind not in ROOTS:
        raise InputError(f"no schema of that kind; expected one of {', '.join(ROOTS)}", given=kind)
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": f"{kind}.yaml of Stateful Dataflow",
        **schema_of(ROOTS[kind]),
        "definitions": {
            named.name: schema_of(named.shape) for named in (TYPE, STATES, STEP, TRANSFORM)
        },
    }
