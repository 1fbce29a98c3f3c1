"""The grammar of SDF's documents, as data.

Source: sdf-states.md 2.1, 2.3, 2.4, 2.9 and 5.1.
"""

from __future__ import annotations

from arroyo_dagster.dataflow.definition.durations import DURATION_PATTERN
from arroyo_dagster.dataflow.definition.shapes import (
    Anything,
    ByName,
    Either,
    Field,
    Flag,
    Judged,
    Many,
    Named,
    Record,
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
_OPTIONAL = Field(shape=_TEXT)
_FILLED = Field(shape=Text(pattern=r"\S"), required=True)
_KEPT = Field(shape=Anything())
_NAMES = Field(shape=Many(Record(fields={"name": _FILLED})))
_DURATION = Text(pattern=DURATION_PATTERN)
_STEPS = Field(shape=Many(Named("transform")))
_TYPE = Field(shape=_TEXT, required=True)


def _typed(**fields: Field) -> Record:
    return Record(fields={"type": _TYPE, **fields})


def _member(shape: Shape) -> Field:
    return Field(shape=shape, required=True)


# ---- types and states: their readers check them, with numbers of their own -----------------------

COLUMN = Record(fields={"type": Field(shape=Text(choices=tuple(COLUMN_TYPES)), required=True)})
COLUMN_NAME = r"^(?!_key$|_updated_at$|_window)(?=[\s\S]*\S)"
ROW = _typed(properties=_member(ByName(COLUMN, names=COLUMN_NAME)), ttl=Field(shape=_DURATION))
PRIMITIVE = _typed(
    properties=_member(
        Record(
            fields={
                "value": _member(
                    Either(
                        (
                            Text(choices=tuple(SCALARS)),
                            Record(fields={"type": _member(Text(choices=tuple(SCALARS)))}),
                        )
                    )
                )
            }
        )
    )
)
NOT_KEYS = tuple(sorted((BUILT_IN - {"timestamp"}) - set(KEY_TYPES)))
KEY = Record(fields={"type": Field(shape=Text(never=NOT_KEYS), required=True)})
PLAIN = Record(
    fields={
        "type": Field(
            shape=Text(never=(*UNSUPPORTED_VALUES, "keyed-state", "timestamp")), required=True
        )
    }
)
VALUE = Variants(by_type={"arrow-row": ROW, "primitive": PRIMITIVE}, otherwise=PLAIN)
KEYED = _typed(
    properties=_member(Record(fields={"key": _member(KEY), "value": _member(VALUE)})),
)
REFERENCE = Record(fields={"from": _member(Text(pattern=r"^[^.]+\.[^.]+$")), "name": _OPTIONAL})
SYSTEM = Record(fields={"system": _FILLED, "name": _OPTIONAL})
_NO_STATE = tuple(sorted(BUILT_IN - {"keyed-state", "timestamp"}))
NAMED_STATE = Record(
    fields={"type": Field(shape=Text(never=_NO_STATE), required=True), "name": _OPTIONAL}
)
TYPED = Variants(by_type={"keyed-state": KEYED, "key-value": KEYED}, otherwise=NAMED_STATE)

_RENAME = Field(shape=Record(fields={"rename": _OPTIONAL}))
_NESTED = {"type-name": _OPTIONAL, "optional": Field(shape=Flag())}
MEMBER_FIELDS = {**_NESTED, "serialize": _RENAME, "deserialize": _RENAME, "converter": _OPTIONAL}
_INNER = _member(Named("type"))
OBJECT = _typed(properties=_member(ByName(Named("type"))))
ENUM = _typed(
    oneOf=_member(ByName(Named("type"))),
    tagging=Field(shape=Text(choices=("externally-tagged", "untagged"))),
)
LIST = _typed(items=_INNER)
OPTION = _typed(value=_INNER)
KEY_VALUE = _typed(properties=_member(Record(fields={"key": _INNER, "value": _INNER})))
COMPOSITE_SHAPES = {
    "object": OBJECT,
    "enum": ENUM,
    "list": LIST,
    "option": OPTION,
    "key-value": KEY_VALUE,
}
_ANY_TYPE = Record(fields={"type": Field(shape=Text(nullable=True), required=True)}, open=True)
TYPE = Variants(
    by_type={**COMPOSITE_SHAPES, "keyed-state": KEYED, "arrow-row": ROW, "primitive": PRIMITIVE},
    otherwise=_ANY_TYPE,
)

# ---- steps, partitions, windows ------------------------------------------------------------------

PARAMETER = Record(
    fields={
        "name": _OPTIONAL,
        "type": _TYPE,
        "kind": Field(shape=Text(choices=("key", "value"))),
        "optional": Field(shape=Flag()),
        "list": Field(shape=Flag()),
    },
    open=True,
)
_STEP_FIELDS = {
    "run": _OPTIONAL,
    "uses": _OPTIONAL,
    "lang": _OPTIONAL,
    "dependencies": Field(shape=Many(Anything())),
    "states": _NAMES,
    "inputs": Field(shape=Many(PARAMETER)),
    "output": Field(shape=PARAMETER),
    "with": _KEPT,
}
STEP = Record(fields=_STEP_FIELDS, one_of=("run", "uses"))
TRANSFORM = Record(
    fields={"operator": Field(shape=Text(choices=TRANSFORMS), required=True), **_STEP_FIELDS},
    one_of=("run", "uses"),
)
_STEP = Named("step")
PARTITION = Record(
    fields={
        "assign-key": Field(shape=_STEP, required=True, also="assign_key"),
        "transforms": _STEPS,
        "update-state": Field(shape=_STEP, also="update_state"),
    }
)
_TIME = Field(shape=_DURATION, number="E37")
_REQUIRED_TIME = Field(shape=_DURATION, required=True, number="E37")
TUMBLING = Record(fields={"duration": _REQUIRED_TIME, "offset": _TIME})
SLIDING = Record(fields={"duration": _REQUIRED_TIME, "slide": _REQUIRED_TIME, "offset": _TIME})
WATERMARK = Record(
    fields={
        "idleness": _TIME,
        "grace-period": Field(shape=_DURATION, number="E37", also="grace_period"),
    }
)
WINDOW = Record(
    fields={
        "tumbling": Field(shape=TUMBLING, number="E37"),
        "sliding": Field(shape=SLIDING, number="E37"),
        "assign-timestamp": Field(
            shape=_STEP, required=True, also="assign_timestamp", number="E37"
        ),
        "watermark": Field(shape=WATERMARK, number="E37"),
        "transforms": _STEPS,
        "partition": Field(shape=PARTITION),
        "flush": Field(shape=_STEP),
    },
    apart=("tumbling", "sliding"),
    needed=True,
)

# ---- services, topics, packages ------------------------------------------------------------------


def _endpoint(*kinds: str) -> Record:
    return Record(
        fields={
            "type": Field(shape=Text(choices=kinds), required=True),
            "id": _OPTIONAL,
            "transforms": _STEPS,
        }
    )


SERVICE = Record(
    fields={
        "sources": Field(
            shape=Many(_endpoint("topic", "schedule"), least=1), required=True, number="E39"
        ),
        "sinks": Field(shape=Many(_endpoint("topic", "no-target"))),
        "states": Field(shape=Judged(Named("states"))),
        "transforms": _STEPS,
        "partition": Field(shape=PARTITION),
        "window": Field(shape=WINDOW),
    },
    apart=("partition", "window"),
)
_STATE_ENTRY = Either((TYPED, REFERENCE, SYSTEM))
TOPIC = Record(
    fields={
        "name": _OPTIONAL,
        "schema": Field(
            shape=Record(
                fields={
                    "key": Field(shape=Judged(Named("type"))),
                    "value": Field(shape=Judged(Named("type"))),
                },
                open=True,
            )
        ),
    },
    open=True,
)
IMPORT = Record(
    fields={
        "pkg": Field(shape=Text(pattern=PACKAGE_ID), required=True),
        "path": _OPTIONAL,
        "types": _NAMES,
        "states": _NAMES,
        "functions": Field(shape=Many(Record(fields={"name": _FILLED, "alias": _OPTIONAL}))),
    }
)
META = Record(fields={"name": _FILLED, "version": _FILLED, "namespace": _FILLED})
FUNCTION = Record(
    fields={
        "operator": Field(shape=Text(choices=OPERATORS), required=True),
        **{name: one for name, one in _STEP_FIELDS.items() if name not in ("uses", "with")},
    }
)


def _root(versions: tuple[str, ...], **fields: Field) -> Record:
    return Record(
        fields={
            "apiVersion": Field(shape=Judged(Text(choices=versions)), required=True),
            "meta": Field(shape=META, required=True),
            "imports": Field(shape=Many(IMPORT)),
            "types": Field(shape=ByName(Judged(Named("type")))),
            **fields,
        }
    )


KEPT_BY_DATAFLOWS = ("config", "dev", "schedule", "packages")
KEPT_BY_PACKAGES = ("config", "dev", "tests")
DATAFLOW = _root(
    DATAFLOW_VERSIONS,
    services=Field(shape=ByName(SERVICE), required=True),
    topics=Field(shape=ByName(TOPIC)),
    **dict.fromkeys(KEPT_BY_DATAFLOWS, _KEPT),
)
PACKAGE = _root(
    PACKAGE_VERSIONS,
    states=Field(shape=Judged(ByName(TYPED))),
    functions=Field(shape=ByName(FUNCTION)),
    **dict.fromkeys(KEPT_BY_PACKAGES, _KEPT),
)

GRAMMAR: dict[str, Shape] = {
    "type": TYPE,
    "states": Either((ByName(_STATE_ENTRY), Many(_STATE_ENTRY))),
    "step": STEP,
    "transform": TRANSFORM,
}
"""The shapes that others name."""
