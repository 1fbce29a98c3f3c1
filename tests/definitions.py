# ruff: noqa: E501 - a table with a case a line reads better than one that is wrapped
"""SDF definitions with one mistake each, and the pieces they are made of."""

from __future__ import annotations

KEYED = "{type: keyed-state, properties: {key: {type: string}, value: {type: u32}}}"
RUST = "run: 'fn %s(x: String) -> Result<%s> { todo }'"


def dataflow(
    states: str = "{}", rest: str = "transforms: [{operator: map, uses: m:f}]", root: str = ""
) -> str:
    return (
        "apiVersion: 0.6.0\nmeta: {name: n, version: 0.1.0, namespace: s}\n"
        f"topics: {{t: {{schema: {{value: {{type: string}}}}}}, n: {{schema: {{value: {{type: u8}}}}}}}}\n"
        f"{root}\nservices:\n  a:\n    sources: [{{type: topic, id: t}}]\n"
        f"    states: {states}\n    {rest}\n"
    )


def package(functions: str, more: str = "") -> str:
    return (
        "apiVersion: 0.6.0\nmeta: {name: n, version: 0.1.0, namespace: s}\n"
        f"states: {{s: {KEYED}}}\n{more}\nfunctions: {functions}\n"
    )


def value(text: str) -> str:
    return f"{{s: {{type: keyed-state, properties: {{key: {{type: string}}, value: {text}}}}}}}"


def column(text: str) -> str:
    return value(f"{{type: arrow-row, properties: {text}}}")


def key(text: str) -> str:
    return (
        f"{{s: {{type: keyed-state, properties: {{key: {{type: {text}}}, value: {{type: u32}}}}}}}}"
    )


def window(text: str, *, timestamp: str = "assign-timestamp: {uses: t}, ") -> str:
    return f"window: {{{timestamp}partition: {{assign-key: {{uses: k}}, transforms: [{{operator: map, uses: m}}]}}, {text}}}"


def step(operator: str, body: str) -> str:
    if operator in ("assign-key", "update-state"):
        other = "update-state: {uses: u}" if operator == "assign-key" else "assign-key: {uses: k}"
        return f"partition: {{{other}, {operator}: {{{body}}}}}"
    if operator in ("assign-timestamp", "flush"):
        rest = "" if operator == "assign-timestamp" else "assign-timestamp: {uses: t}, "
        return f"window: {{{rest}tumbling: {{duration: 1s}}, {operator}: {{{body}}}}}"
    return f"transforms: [{{operator: {operator}, {body}}}]"


S = "services.a.states.s"
P = f"{S}.properties"
CASES: list[tuple[str, str, str, tuple[str, ...]]] = [
    # E01 to E06: the document
    ("E01", dataflow().replace("0.6.0", "0.3.0"), "apiVersion", ("`0.3.0`", "0.5.0")),
    ("E01", dataflow().replace("apiVersion: 0.6.0\n", ""), "apiVersion", ("missing", "0.5.0")),
    ("E01", dataflow().replace("0.6.0", "0.5"), "apiVersion", ("`0.5`", "0.5.0")),
    ("E02", dataflow(root="schedule: {x: {}}").replace("0.6.0", "0.5.0"), "schedule", ("0.6.0",)),
    ("E03", dataflow("{a: {system: x}, a: {system: x}}"), "services.a.states.a", ("duplicate key",)),
    ("E04", dataflow().replace("services:", "servers:"), "services", ("missing",)),
    ("E04", dataflow(root="imports: 5"), "imports", ("a list", "an integer")),
    ("E04", dataflow(rest="transforms: [{operator: fold, uses: x}]"), "services.a.transforms[0].operator", ("fold", "flat-map")),
    ("E04", dataflow(rest=step("fold", "run: 'def f(x): return x'")), "services.a.transforms[0].operator", ("fold",)),
    ("E04", dataflow(rest="transforms: [{operator: map}]"), "services.a.transforms[0]", ("`run` or `uses`",)),
    ("E04", dataflow(root="types: {u8: {type: u16}}"), "types.u8", ("built-in",)),
    ("E04", dataflow(root="types: {o: {type: object}}"), "types.o.properties", ("properties",)),
    ("E05", dataflow().replace("name: n,", "name: '',"), "meta.name", ("cannot be empty",)),
    ("E06", dataflow(root="imports: [{pkg: thing}]"), "imports[0].pkg", ("`thing`", "<namespace>/<name>@<version>")),
    # E10 to E17: states
    ("E10", dataflow("{s: 5}"), S, ("Invalid state definition", "service `a`", "`s`")),
    ("E10", dataflow("{s: {type: 5}}"), f"{S}.type", ("Invalid state definition",)),
    ("E10", dataflow("{s: {from: b.s, type: keyed-state}}"), S, ("`type` and `from`",)),
    ("E11", dataflow("{s: {properties: {}}}"), f"{S}.type", ("must be a key value type", "`_`")),
    ("E11", dataflow("{s: {type: arrow-row}}"), f"{S}.type", ("must be a key value type", "arrow-row")),
    ("E12", dataflow("{s: {type: keyed-state}}"), P, ("properties",)),
    ("E12", dataflow("{s: {type: keyed-state, properties: {value: {type: u32}}}}"), f"{P}.key", ("`key`",)),
    ("E12", dataflow("{s: {type: keyed-state, properties: {key: {type: u8}}}}"), f"{P}.value", ("`value`",)),
    ("E12", dataflow(value("{type: arrow-row}")), f"{P}.value.properties", ("properties",)),
    ("E13", dataflow(value("{type: object, properties: {}}")), f"{P}.value.type", ("unsupported type for value", "`object`")),
    ("E13", dataflow(value("{type: bytes}")), f"{P}.value.type", ("`bytes`",)),
    ("E13", dataflow(value("{type: timestamp}")), f"{P}.value.type", ("`timestamp`",)),
    ("E13", dataflow(value("{type: lights}"), root="types: {lights: {type: list, items: {type: u8}}}"), f"{P}.value.type", ("`lights`",)),
    ("E14", dataflow(key("no_progress-of")), f"{P}.key.type", ("key type", "no_progress-of", "not found")),
    ("E14", dataflow(key("f32")), f"{P}.key.type", ("key type", "hashable")),
    ("E14", dataflow(key("o"), root="types: {o: {type: object, properties: {}}}"), f"{P}.key.type", ("hashable",)),
    ("E15", dataflow("{s: {from: ''}}"), f"{S}.from", ("empty", "<service>.<state>")),
    ("E15", dataflow("{s: {from: b}}"), f"{S}.from", ("no dot",)),
    ("E15", dataflow("{s: {from: .s}}"), f"{S}.from", ("the service before",)),
    ("E15", dataflow("{s: {from: b.}}"), f"{S}.from", ("the state before",)),
    ("E15", dataflow("{s: {from: b.s.t}}"), f"{S}.from", ("two segments",)),
    ("E16", dataflow("{s: {from: b.s}}"), S, ("`b.s` is not defined in the dataflow", "`a`")),
    ("E16", dataflow("{s: {from: a.s}}"), S, ("itself", "not defined in the dataflow")),
    ("E16", dataflow("{s: {from: b.s}}") + "  b: {sources: [{type: topic, id: t}], states: {s: {from: a.s}}}\n", S, ("reference", "not defined in the dataflow")),
    ("E17", dataflow("{s: {system: ''}}"), f"{S}.system", ("system",)),
    # E18 to E23: columns, names, types
    ("E18", dataflow(value("{type: arrow-row, properties: {}, ttl: 5}")), f"{P}.value.ttl", ("`5`", "unit")),
    ("E18", dataflow(value("{type: u32, ttl: 5s}")), f"{P}.value.ttl", ("SDF has none",)),
    ("E18", dataflow("{s: {type: keyed-state, ttl: 5s, properties: {key: {type: u8}, value: {type: u32}}}}"), f"{S}.ttl", ("misplaced",)),
    ("E18", dataflow(column("{ttl: 5s}")), f"{P}.value.properties.ttl", ("misplaced",)),
    ("E19", dataflow(column("{c: u32}")), f"{P}.value.properties.c", ("`c`", "u32, u64")),
    ("E19", dataflow(column("{c: {type: list}}")), f"{P}.value.properties.c", ("`list`",)),
    ("E19", dataflow(root="types: {r: {type: arrow-row, properties: {c: {type: x}}}}"), "types.r.properties.c", ("`x`",)),
    ("E20", dataflow(column("{'': {type: u8}}")), f'{P}.value.properties.""', ("Column name",)),
    ("E20", dataflow(column("{_key: {type: u8}}")), f"{P}.value.properties._key", ("reserved",)),
    ("E20", dataflow(column("{_window_x: {type: u8}}")), f"{P}.value.properties._window_x", ("reserved",)),
    ("E20", dataflow(column("{a-b: {type: u8}, a_b: {type: u8}}")), f"{P}.value.properties.a_b", ("unique", "`a-b`")),
    ("E21", dataflow(f"{{s: {KEYED}}}", root="types: {s: {type: u8}}"), S, ("`s`", "line 4")),
    ("E21", dataflow(f"{{'': {KEYED}}}"), 'services.a.states.""', ("empty",)),
    ("E22", dataflow(f"{{x-y: {KEYED}, x_y: {KEYED}}}"), "services.a.states.x_y", ("already defined",)),
    ("E22", dataflow(f"[{{name: s, {KEYED[1:]}, {{name: s, {KEYED[1:].replace('string', 'u8')}]"), "services.a.states[1]", ("already defined",)),
    ("E22", dataflow(f"{{s: {KEYED}}}") + f"  b: {{sources: [{{type: topic, id: t}}], states: {{s: {KEYED}}}}}\n", "services.b.states.s", ("already defined by `a`",)),
    ("E23", dataflow(value("{type: nothing}")), f"{P}.value.type", ("Referenced type", "nothing", "not found")),
    ("E23", dataflow(root="types: {x: {type: y}, y: {type: z}}"), "types.x", ("`z` not found",)),
    ("E23", dataflow(root="types: {x: {type: x}}"), "types.x", ("circle",)),
    # E24 to E29, E38: bodies
    ("E24", dataflow(rest=f"transforms: [{{operator: map, {RUST % ('f', 'u8')}}}, {{operator: map, {RUST % ('f', 'u8')}}}]"), "services.a.transforms[1].run", ("`f`", "unique")),
    ("E25", dataflow(rest=step("map", "run: 'hello world'")), "services.a.transforms[0].run", ("python, rust",)),
    ("E25", dataflow(rest=step("map", "lang: cobol, run: 'x'")), "services.a.transforms[0].run", ("cobol",)),
    ("E27", dataflow(rest=step("map", "run: 'def f(x: return'")), "services.a.transforms[0].run", ("parse",)),
    ("E27", dataflow(rest=step("map", "run: 'async def f(x): return x'")), "services.a.transforms[0].run", ("async",)),
    ("E27", dataflow(rest=step("map", "run: 'def f(*x): return x'")), "services.a.transforms[0].run", ("`*`",)),
    ("E27", dataflow(rest=step("map", "run: 'def f(a, b, c): return a'")), "services.a.transforms[0].run", ("1 or 2",)),
    ("E27", dataflow(rest=step("filter", "run: 'def f(a): yield a'")), "services.a.transforms[0].run", ("generator",)),
    ("E27", dataflow(rest=step("map", 'run: "def f(a): return a\\nprint(5)"')), "services.a.transforms[0].run", ("line 2",)),
    ("E28", dataflow(rest=step("assign-key", RUST % ("k", "Vec<u8>"))), "services.a.partition.assign-key.run", ("hashable",)),
    ("E29", dataflow(rest=step("assign-timestamp", "run: 'fn t(x: S, at: i64) -> Result<u8> {}'")), "services.a.window.assign-timestamp.run", ("signed 64-bit",)),
    ("E38", dataflow(rest=step("update-state", RUST % ("u", "u8"))), "services.a.partition.update-state.run", ("update-state", "`u8`")),
    ("E38", dataflow(rest=step("filter", RUST % ("f", "String"))), "services.a.transforms[0].run", ("bool",)),
    ("E38", dataflow(rest=step("filter-map", RUST % ("f", "String"))), "services.a.transforms[0].run", ("Option",)),
    ("E38", dataflow(rest=step("map", "run: 'fn f(x: String) { }'")), "services.a.transforms[0].run", ("`()`",)),
    ("E38", dataflow(rest=step("flush", RUST % ("f", "u8"))), "services.a.window.flush.run", ("0",)),
    # E30, E38 in packages
    ("E30", package("{f: {operator: map, states: [{name: q}], output: {type: u8}}}"), "functions.f", ("resolve state", "`q`")),
    ("E38", package("{f: {operator: filter, inputs: [{name: x, type: u8}], output: {type: u8}}}"), "functions.f", ("bool", "u8")),
    ("E38", package("{f: {operator: filter-map, inputs: [{name: x, type: u8}], output: {type: u8}}}"), "functions.f", ("optional",)),
    ("E38", package("{f: {operator: update-state, output: {type: u8}}}"), "functions.f", ("update-state",)),
    ("E10", package("{}").replace(KEYED, "{from: a.b}"), "states.s", ("typed",)),
    # E36, E37, E39: services
    ("E36", dataflow(rest=window("tumbling: {duration: 1s}") + "\n    partition: {assign-key: {uses: k}, update-state: {uses: u}}"), "services.a.partition", ("`window`", "`partition`")),
    ("E36", dataflow(rest=window("hopping: {duration: 1s}")), "services.a.window", ("neither",)),
    ("E36", dataflow(rest=window("tumbling: {duration: 1s}, sliding: {duration: 1s, slide: 1s}")), "services.a.window", ("tumbling", "sliding")),
    ("E37", dataflow(rest=window("tumbling: {duration: 1s}", timestamp="")), "services.a.window.assign-timestamp", ("assign-timestamp",)),
    ("E37", dataflow(rest=window("tumbling: {duration: 0s}")), "services.a.window.tumbling.duration", ("duration", "`0s`")),
    ("E37", dataflow(rest=window("tumbling: {duration: 5}")), "services.a.window.tumbling.duration", ("text",)),
    ("E37", dataflow(rest=window("sliding: {duration: 1s}")), "services.a.window.sliding.slide", ("slide",)),
    ("E37", dataflow(rest=window("sliding: {duration: 1s, slide: 2s}")), "services.a.window.sliding.slide", ("longer",)),
    ("E37", dataflow(rest=window("sliding: {duration: 1d, slide: 1ms}")), "services.a.window.sliding.slide", ("10000",)),
    ("E37", dataflow(rest=window("tumbling: {duration: 1s}, watermark: {idleness: soon}")), "services.a.window.watermark.idleness", ("`soon`",)),
    ("E37", dataflow(rest=window("tumbling: {duration: 1s}, watermark: {grace_period: soon}")), "services.a.window.watermark.grace_period", ("`soon`",)),
    ("E39", dataflow().replace("    sources: [{type: topic, id: t}]\n", ""), "services.a.sources", ("missing",)),
    ("E39", dataflow().replace("id: t}]", "id: x}]"), "services.a.sources[0].id", ("`x`", "`a`")),
    ("E39", dataflow().replace("id: t}]", "id: t}, {type: topic, id: n}]"), "services.a.sources", ("`string` and `u8`",)),
    ("E39", dataflow().replace("{type: topic, id: t}]", "{type: schedule, id: x}]"), "services.a.sources[0].id", ("schedule",)),
]  # fmt: skip
