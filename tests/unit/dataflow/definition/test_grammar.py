"""Protects the one table of members: all that is read and written of the YAML is in `grammar`.

`EVERY_DATAFLOW` and `EVERY_PACKAGE` have every member that the grammar knows.
"""

from __future__ import annotations

import pytest

from arroyo_dagster.dataflow.definition import grammar, shapes
from arroyo_dagster.dataflow.definition.definition import Dataflow, Package
from arroyo_dagster.dataflow.definition.diagnostics import Diagnostics, InvalidDefinition
from arroyo_dagster.dataflow.definition.reading import parse_document
from arroyo_dagster.dataflow.definition.shapes import MappingShape, Shape, check, text_of
from arroyo_dagster.dataflow.definition.yaml_tree import Node, read_tree
from arroyo_dagster.dataflow.testing.suite import find_tests

EVERY_DATAFLOW = """
apiVersion: 0.6.0
meta: {name: every, version: 0.1.0, namespace: members}
config: {converter: json}
dev: {converter: raw}
packages: [{name: x}]
schedule: {hourly: {cron: "0 * * * *"}}
imports:
  - pkg: demo/counting@0.1.0
    path: packages/counting
    types: [{name: amount}]
    states: [{name: brought}]
    functions: [{name: count-word, alias: count-it}]
types:
  o:
    type: object
    type-name: thing
    properties:
      a: {type: string, optional: true, serialize: {rename: A}, deserialize: {rename: AA}}
      b: {type: string, converter: raw}
  e: {type: enum, tagging: untagged, oneOf: {x: {type: o}}}
  l: {type: list, items: {type: o}}
  p: {type: option, value: {type: o}}
  kv: {type: key-value, properties: {key: {type: string}, value: {type: o}}}
  k: {type: keyed-state, properties: {key: {type: string}, value: {type: row}}}
  row: {type: arrow-row, ttl: 1h, properties: {n: {type: u8}}}
  one: {type: primitive, ttl: 1h, properties: {value: {type: u32}}}
  u: {type: u32}
  two: {type: primitive, properties: {value: i32}}
topics:
  t: {name: t, schema: {key: {type: string}, value: {type: string}}}
  out: {schema: {value: {type: string}}}
services:
  a:
    sources: [{type: topic, id: t, transforms: [{operator: map, uses: "m:f"}]}]
    sinks: [{type: topic, id: out, transforms: [{operator: map, uses: "m:f"}]}]
    states:
      scalar: {type: keyed-state, was: old, properties: {key: {type: string}, value: {type: u32, ttl: 1h, convert: value + 1}}}
      plain: {type: keyed-state, properties: {key: {type: string}, value: {type: u32, convert: "1"}}}
      primitive: {type: keyed-state, properties: {key: {type: string}, value: {type: primitive, ttl: 1h, properties: {value: u8}, convert: "1"}}}
      alias: {type: keyed-state, properties: {key: {type: string}, value: {type: u, convert: "1"}}}
      rows:
        type: keyed-state
        properties:
          key: {type: string}
          value: {type: arrow-row, type-name: r, optional: true, ttl: 1h, properties: {n: {type: u8, convert: "1"}}}
    transforms:
      - operator: map
        uses: m:f
        with: {limit: 3}
      - operator: map
        lang: python
        dependencies: [{name: numpy, version: "2"}]
        states: [{name: scalar}]
        inputs: [{name: k, type: string, kind: key, optional: true, list: true}]
        output: {type: object, properties: {a: {type: u8}}}
        run: |
          def f(x):
              return x
    partition:
      assign-key: {uses: "m:k", with: {n: 1}}
      transforms: [{operator: map, uses: "m:f"}]
      update-state:
        lang: python
        dependencies: [{name: numpy, version: "2"}]
        states: [{name: scalar}]
        inputs: [{name: x, type: string}]
        output: {type: u8}
        run: |
          def g(x):
              pass
  b:
    sources: [{type: topic, id: t}]
    states:
      - {name: named, type: k, was: [older], properties: {}}
      - {name: scalar, from: a.scalar}
      - {name: system, system: metrics}
      - {name: mine, type: keyed-state, properties: {key: {type: string}, value: {type: u32}}}
    transforms: []
    window:
      sliding: {duration: 1m, slide: 10s, offset: 1s}
      watermark: {idleness: 2m, grace-period: 3s}
      assign-timestamp: {uses: "m:t"}
      transforms: [{operator: map, uses: "m:f"}]
      partition: {assign-key: {uses: "m:k"}, update-state: {uses: "m:u"}}
      flush: {uses: "m:flush"}
  c:
    sources: [{type: topic, id: t}]
    window:
      tumbling: {duration: 1m, offset: 1s}
      assign-timestamp: {uses: "m:t"}
tests:
  - name: every
    records: {t: [{record: a, key: k, timestamp: 1}]}
    close-windows: true
    expect: {out: []}
    expect-states: {scalar: {}}
    expect-failed: {a/f: 1}
"""  # noqa: E501
EVERY_PACKAGE = """
apiVersion: 0.6.0
meta: {name: every, version: 0.1.0, namespace: members}
config: {converter: json}
dev: {converter: raw}
imports: [{pkg: demo/counting@0.1.0}]
types: {amount: {type: u32}}
states:
  s: {type: keyed-state, properties: {key: {type: string}, value: {type: amount}}}
functions:
  f:
    operator: map
    lang: python
    dependencies: [{name: numpy, version: "2"}]
    states: [{name: s}]
    inputs: [{name: x, type: string}]
    output: {type: string}
    run: |
      def f(x):
          return x
tests:
  - {name: one, function: f, states: {s: {}}, value: 1, key: k, state-key: k, expect: 1, expect-states: {s: {}}}
  - {name: two, function: f, expect-error: E41}
"""  # noqa: E501
ROW = "services.a.states.rows.properties.value"
NOT_READ = {
    (ROW, "optional"): "an official file may have it",
    (ROW, "type-name"): "likewise",
    ("tests[0].records.t[0]", "record"): "any value is valid",
    ("types.o.properties.b", "converter"): "a run reads it of a topic's value, as kept",
}
"""Members that no reader asks for, and why."""

Member = tuple[int, str]
"""A table of the grammar, by its identity, and a name in it."""


def tables(*roots: Shape) -> dict[int, MappingShape]:
    """Every table of members below the roots."""
    found: dict[int, MappingShape] = {}
    rest = list(roots)
    while rest:
        shape = rest.pop()
        if isinstance(shape, MappingShape) and id(shape) not in found:
            found[id(shape)] = shape
            rest += [one.shape for one in shape.fields.values()]
        elif isinstance(shape, shapes.Variants):
            rest += [*shape.by_type.values(), shape.otherwise]
        elif isinstance(shape, shapes.Either | shapes.Both):
            rest += shape.shapes
        elif isinstance(shape, shapes.Many | shapes.ByName):
            rest.append(shape.of)
        elif isinstance(shape, shapes.CustomShape | shapes.Named):
            rest.append(shape.shape)
    return found


TABLES = tables(grammar.DATAFLOW, grammar.PACKAGE)
OF_A_TYPE = {id(one) for one in (*grammar.TYPES.by_type.values(), grammar.TYPES.otherwise)}


def member(table: MappingShape, name: str) -> Member:
    """A member; what every type may have is one member for all types."""
    common = name.replace("-", "_") in grammar.MEMBER_FIELDS and id(table) in OF_A_TYPE
    return (0 if common else id(table)), name


EVERY = {
    member(table, name)
    for table in TABLES.values()
    for name, one in table.fields.items()
    if not one.misplaced
}


class Log:
    """The members that readers asked for, and those that documents have."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.present: set[Member] = set()
        self.places: set[tuple[str, str]] = set()
        self.read: set[tuple[str, str]] = set()
        check_members, spelled = shapes._check_members, Node._spelled

        def checked(node: Node, known: list[tuple[MappingShape, bool]]) -> None:
            for table, _ in known:
                for name in table.fields.keys() & node.members.keys():
                    self.present.add(member(table, name))
                    self.places.add((node.path, name))
            check_members(node, known)

        def asked(node: Node, key: str) -> tuple[str, ...]:
            self.read.add((node.path, key))
            return spelled(node, key)

        monkeypatch.setattr(shapes, "_check_members", checked)
        monkeypatch.setattr(Node, "_spelled", asked)


def parsed(text: str) -> Dataflow | Package:
    document = parse_document(text, extended=True)
    find_tests(document, {})
    return document


def _names(members: set[Member]) -> set[str]:
    return {
        f"{name} of {', '.join(TABLES[table].fields) if table else 'types'}"
        for table, name in members
    }


def test_the_documents_have_every_member(monkeypatch: pytest.MonkeyPatch) -> None:
    log = Log(monkeypatch)
    for text in (EVERY_DATAFLOW, EVERY_PACKAGE):
        parsed(text)
    assert _names(EVERY - log.present) == set()


def test_every_member_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    unread = set()
    for text in (EVERY_DATAFLOW, EVERY_PACKAGE):
        log = Log(monkeypatch)
        parsed(text)
        unread |= log.places - log.read
    assert unread == NOT_READ.keys()


def test_a_reader_gets_no_member_that_the_grammar_lacks() -> None:
    root = read_tree("meta: {name: n}", Diagnostics())
    assert root is not None
    check(root, grammar.DATAFLOW)
    meta = root.get("meta")
    assert meta is not None
    assert text_of(meta, "name") == "n"
    with pytest.raises(LookupError, match="no member `nmae` at `meta`"):
        meta.get("nmae")


def test_a_list_may_have_an_item() -> None:
    other = EVERY_DATAFLOW.replace("type: list, items:", "type: list, item:")
    assert other != EVERY_DATAFLOW
    assert parsed(other) == parsed(EVERY_DATAFLOW)


def test_a_second_reading_of_tests_reports_only_its_own_errors() -> None:
    text = EVERY_PACKAGE.replace("{s: {}}, value", "{far: {}}, value")
    document = parse_document(text.replace("0.1.0}]", "0.1.0, states: [{name: far}]}]"))
    with pytest.raises(InvalidDefinition, match="no state `far`"):
        find_tests(document, {})
    head, _, rest = EVERY_PACKAGE.partition("imports: [{pkg: demo/counting@0.1.0}]")
    other = parse_document(head + rest.partition("functions")[0].replace("  s:", "  far:"))
    assert isinstance(other, Package)
    assert len(find_tests(document, {"demo/counting@0.1.0": other})) == 2
