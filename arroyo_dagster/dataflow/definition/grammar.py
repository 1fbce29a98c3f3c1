"""The grammar of SDF's documents, as data.

Source: sdf-states.md 2.1, 2.3, 2.4, 2.9 and 5.1.
"""

from __future__ import annotations

from arroyo_dagster.dataflow.definition.durations import DURATION_PATTERN
from arroyo_dagster.dataflow.definition.shapes import (
    Anything,
    Both,
    ByName,
    Count,
    CustomShape,
    Either,
    FieldShape,
    Flag,
    Many,
    MappingShape,
    Named,
    Shape,
    Text,
    Variants,
)
from arroyo_dagster.dataflow.definition.types import (
    BUILT_IN,
    COLUMN_TYPES,
    KEY_TYPES,
    SCALARS,
    UNSUPPORTED_VALUES,
)

DATAFLOW_VERSIONS = ("0.5.0", "0.6.0")
PACKAGE_VERSIONS = ("0.4.0", "0.5.0", "0.6.0")
LEGACY_VERSIONS = ("0.1.0", "0.2.0", "0.3.0", "0.4.0", "0.5.0", "0.6.0")

TRANSFORMS = ("map", "filter", "filter-map", "flat-map")
OPERATORS = (*TRANSFORMS, "assign-key", "assign-timestamp", "update-state", "aggregate", "flush")
PACKAGE_ID = r"^[^/@\s]+/[^/@\s]+@[^/@\s]+$"

_TEXT = Text()
_OPTIONAL = FieldShape(shape=_TEXT)
_FILLED = FieldShape(shape=Text(pattern=r"\S"), required=True)
_KEPT = FieldShape(shape=Anything())
_NAMES = FieldShape(shape=Many(MappingShape(fields={"name": _FILLED})))
_DURATION = Text(pattern=DURATION_PATTERN)
_STEPS = FieldShape(shape=Many(Named("transform")))
_TYPE = FieldShape(shape=_TEXT, required=True)


def _typed(**fields: FieldShape) -> MappingShape:
    return MappingShape(fields={"type": _TYPE, **fields})


def _member(shape: Shape) -> FieldShape:
    return FieldShape(shape=shape, required=True)


def _misplaced_ttl(belongs: str) -> FieldShape:
    return FieldShape(shape=Anything(), number="E18", misplaced=belongs)


# ---- types and states: their readers check them and report their own error numbers ---------------

COLUMN = MappingShape(
    fields={
        "type": FieldShape(shape=Text(choices=tuple(COLUMN_TYPES)), required=True),
        "convert": _OPTIONAL,
    }
)
COLUMN_NAME = r"^(?!_key$|_updated_at$|_window)(?=[\s\S]*\S)"
_NESTED = {"type-name": _OPTIONAL, "optional": FieldShape(shape=Flag())}
ROW = _typed(
    properties=_member(ByName(COLUMN, names=COLUMN_NAME)),
    ttl=FieldShape(shape=_DURATION),
    **_NESTED,
)
PRIMITIVE = _typed(
    ttl=FieldShape(shape=_DURATION),
    properties=_member(
        MappingShape(
            fields={
                "value": _member(
                    Either(
                        (
                            Text(choices=tuple(SCALARS)),
                            MappingShape(fields={"type": _member(Text(choices=tuple(SCALARS)))}),
                        )
                    )
                )
            }
        )
    ),
)
NOT_KEYS = tuple(sorted((BUILT_IN - {"timestamp"}) - set(KEY_TYPES)))
KEY = MappingShape(fields={"type": FieldShape(shape=Text(never=NOT_KEYS), required=True)})
PLAIN = MappingShape(
    fields={
        "type": FieldShape(
            shape=Text(never=(*UNSUPPORTED_VALUES, "keyed-state", "timestamp")), required=True
        ),
        "convert": _OPTIONAL,
        "ttl": _misplaced_ttl("only an arrow-row or a primitive value takes one"),
    },
    open=True,
)
_SCALAR_VALUE = _typed(ttl=FieldShape(shape=_DURATION), convert=_OPTIONAL)
VALUE = Variants(
    by_type={
        "arrow-row": ROW,
        "primitive": MappingShape(fields={**PRIMITIVE.fields, "convert": _OPTIONAL}),
        **dict.fromkeys(SCALARS, _SCALAR_VALUE),
    },
    otherwise=PLAIN,
)
KEYED = _typed(
    properties=_member(
        MappingShape(
            fields={
                "key": _member(KEY),
                "value": _member(VALUE),
                "ttl": _misplaced_ttl("it belongs into `value`, beside its `properties`"),
            }
        )
    ),
    ttl=_misplaced_ttl("it belongs into `properties.value`, beside its `properties`"),
)
REFERENCE = MappingShape(
    fields={
        "from": _member(Text(pattern=r"^[^.]+\.[^.]+$")),
        "name": _OPTIONAL,
        "ttl": _misplaced_ttl("a reference has that of its owner"),
    }
)
SYSTEM = MappingShape(fields={"system": _FILLED, "name": _OPTIONAL})
_NO_STATE = tuple(sorted(BUILT_IN - {"keyed-state", "timestamp"}))
WAS = FieldShape(shape=Either((_TEXT, Many(_TEXT))))
NAMED_STATE = MappingShape(
    fields={
        "type": FieldShape(shape=Text(never=_NO_STATE), required=True),
        "properties": _KEPT,
        "name": _OPTIONAL,
        "was": WAS,
    }
)
STATE = MappingShape(fields={**KEYED.fields, "name": _OPTIONAL, "was": WAS})
TYPED = Variants(by_type={"keyed-state": STATE, "key-value": STATE}, otherwise=NAMED_STATE)

_RENAME = FieldShape(shape=MappingShape(fields={"rename": _OPTIONAL}))
MEMBER_FIELDS = {**_NESTED, "serialize": _RENAME, "deserialize": _RENAME, "converter": _OPTIONAL}
_INNER = _member(Named("type"))
OBJECT = _typed(properties=_member(ByName(Named("type"))))
TAGGING = Text(choices=("externally-tagged", "untagged"))
ENUM = _typed(oneOf=_member(ByName(Named("type"))), tagging=FieldShape(shape=TAGGING))
LIST = _typed(items=FieldShape(shape=Named("type"), required=True, also="item"))
OPTION = _typed(value=_INNER)
KEY_VALUE = _typed(properties=_member(MappingShape(fields={"key": _INNER, "value": _INNER})))
_TYPES = {
    "object": OBJECT,
    "enum": ENUM,
    "list": LIST,
    "option": OPTION,
    "key-value": KEY_VALUE,
    "keyed-state": KEYED,
    "arrow-row": ROW,
    "primitive": PRIMITIVE,
}
TYPE = Variants(
    by_type={
        name: MappingShape(fields={**shape.fields, **MEMBER_FIELDS})
        for name, shape in _TYPES.items()
    },
    otherwise=MappingShape(
        fields={
            "type": FieldShape(shape=Text(nullable=True), required=True),
            **MEMBER_FIELDS,
        },
        open=True,
    ),
)

# ---- steps, partitions, windows ------------------------------------------------------------------

PARAMETER = Both(
    (
        _typed(
            name=_OPTIONAL,
            kind=FieldShape(shape=Text(choices=("key", "value"))),
            optional=FieldShape(shape=Flag()),
            list=FieldShape(shape=Flag()),
        ),
        Named("type"),
    )
)
_STEP_FIELDS = {
    "run": _OPTIONAL,
    "uses": _OPTIONAL,
    "lang": _OPTIONAL,
    "dependencies": FieldShape(shape=Many(Anything())),
    "states": _NAMES,
    "inputs": FieldShape(shape=Many(PARAMETER)),
    "output": FieldShape(shape=PARAMETER),
    "with": _KEPT,
}
STEP = MappingShape(fields=_STEP_FIELDS, one_of=("run", "uses"))
TRANSFORM = MappingShape(
    fields={"operator": FieldShape(shape=Text(choices=TRANSFORMS), required=True), **_STEP_FIELDS},
    one_of=("run", "uses"),
)
_STEP = Named("step")
PARTITION = MappingShape(
    fields={
        "assign-key": FieldShape(shape=_STEP, required=True, also="assign_key"),
        "transforms": _STEPS,
        "update-state": FieldShape(shape=_STEP, also="update_state"),
    }
)
_TIME = FieldShape(shape=_DURATION, number="E37")
_REQUIRED_TIME = FieldShape(shape=_DURATION, required=True, number="E37")
TUMBLING = MappingShape(fields={"duration": _REQUIRED_TIME, "offset": _TIME})
SLIDING = MappingShape(
    fields={"duration": _REQUIRED_TIME, "slide": _REQUIRED_TIME, "offset": _TIME}
)
WATERMARK = MappingShape(
    fields={
        "idleness": _TIME,
        "grace-period": FieldShape(shape=_DURATION, number="E37", also="grace_period"),
    }
)
WINDOW = MappingShape(
    fields={
        "tumbling": FieldShape(shape=TUMBLING, number="E37"),
        "sliding": FieldShape(shape=SLIDING, number="E37"),
        "assign-timestamp": FieldShape(
            shape=_STEP, required=True, also="assign_timestamp", number="E37"
        ),
        "watermark": FieldShape(shape=WATERMARK, number="E37"),
        "transforms": _STEPS,
        "partition": FieldShape(shape=PARTITION),
        "flush": FieldShape(shape=_STEP),
    },
    apart=("tumbling", "sliding"),
    needed=True,
)

# ---- services, topics, packages ------------------------------------------------------------------


def _endpoint(*kinds: str) -> MappingShape:
    return MappingShape(
        fields={
            "type": FieldShape(shape=Text(choices=kinds), required=True),
            "id": _OPTIONAL,
            "transforms": _STEPS,
        }
    )


SERVICE = MappingShape(
    fields={
        "sources": FieldShape(
            shape=Many(_endpoint("topic", "schedule"), least=1), required=True, number="E39"
        ),
        "sinks": FieldShape(shape=Many(_endpoint("topic", "no-target"))),
        "states": FieldShape(shape=CustomShape(Named("states"))),
        "transforms": _STEPS,
        "partition": FieldShape(shape=PARTITION),
        "window": FieldShape(shape=WINDOW),
    },
    apart=("partition", "window"),
)
_STATE_ENTRY = Either((TYPED, REFERENCE, SYSTEM))
TOPIC = MappingShape(
    fields={
        "name": _OPTIONAL,
        "schema": FieldShape(
            shape=MappingShape(
                fields={
                    "key": FieldShape(shape=CustomShape(Named("type"))),
                    "value": FieldShape(shape=CustomShape(Named("type"))),
                },
                open=True,
            )
        ),
    },
    open=True,
)
IMPORT = MappingShape(
    fields={
        "pkg": FieldShape(shape=Text(pattern=PACKAGE_ID), required=True),
        "path": _OPTIONAL,
        "types": _NAMES,
        "states": _NAMES,
        "functions": FieldShape(
            shape=Many(MappingShape(fields={"name": _FILLED, "alias": _OPTIONAL}))
        ),
    }
)
META = MappingShape(fields={"name": _FILLED, "version": _FILLED, "namespace": _FILLED})
FUNCTION = MappingShape(
    fields={
        "operator": FieldShape(shape=Text(choices=OPERATORS), required=True),
        **{name: one for name, one in _STEP_FIELDS.items() if name not in ("uses", "with")},
    }
)

# ---- tests, an extension: only `sdf check` and `sdf test` read them ------------------------------

_ROWS = FieldShape(shape=ByName(ByName(Anything())))
RECORD = MappingShape(
    fields={
        "record": _KEPT,
        "key": FieldShape(shape=Either((_TEXT, Count(), Flag()))),
        "timestamp": FieldShape(shape=Either((_TEXT, Count()))),
    },
    closed=True,
)
"""A record with its key, its time or both; any other value is a record without them."""
_RECORDS = ByName(Many(Either((CustomShape(RECORD, later=True), Anything()))))
PACKAGE_TEST = MappingShape(
    fields={
        "name": _FILLED,
        "function": _FILLED,
        "states": _ROWS,
        "value": _KEPT,
        "key": _KEPT,
        "state-key": _KEPT,
        "expect": _KEPT,
        "expect-states": _ROWS,
        "expect-error": _OPTIONAL,
    },
    closed=True,
)
DATAFLOW_TEST = MappingShape(
    fields={
        "name": _FILLED,
        "records": FieldShape(shape=Either((_RECORDS, Many(_RECORDS)))),
        "close-windows": FieldShape(shape=Flag()),
        "expect": FieldShape(shape=_RECORDS),
        "expect-states": _ROWS,
        "expect-failed": FieldShape(shape=ByName(Count())),
    },
    closed=True,
)


def _root(versions: tuple[str, ...], **fields: FieldShape) -> MappingShape:
    return MappingShape(
        fields={
            "apiVersion": FieldShape(shape=CustomShape(Text(choices=versions)), required=True),
            "meta": FieldShape(shape=META, required=True),
            "imports": FieldShape(shape=Many(IMPORT)),
            "types": FieldShape(shape=ByName(CustomShape(Named("type")))),
            **fields,
        }
    )


KEPT_BY_DATAFLOWS = ("config", "dev", "schedule", "packages", "tests")
KEPT_BY_PACKAGES = ("config", "dev", "tests")
DATAFLOW = _root(
    DATAFLOW_VERSIONS,
    services=FieldShape(shape=ByName(SERVICE), required=True),
    topics=FieldShape(shape=ByName(TOPIC)),
    **dict.fromkeys(KEPT_BY_DATAFLOWS, _KEPT)
    | {"tests": FieldShape(shape=CustomShape(Many(DATAFLOW_TEST), later=True))},
)
PACKAGE = _root(
    PACKAGE_VERSIONS,
    states=FieldShape(shape=CustomShape(ByName(TYPED))),
    functions=FieldShape(shape=ByName(FUNCTION)),
    **dict.fromkeys(KEPT_BY_PACKAGES, _KEPT)
    | {"tests": FieldShape(shape=CustomShape(Many(PACKAGE_TEST), later=True))},
)

GRAMMAR: dict[str, Shape] = {
    "type": TYPE,
    "states": Either((ByName(_STATE_ENTRY), Many(_STATE_ENTRY))),
    "step": STEP,
    "transform": TRANSFORM,
}
"""The shapes that `Named` refers to."""
