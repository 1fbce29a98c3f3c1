"""Read `states` blocks from YAML.

Source: sdf-states.md 2.3 to 2.6, 2.9 to 2.12; errors E10 to E23.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from arroyo_dagster.dataflow.definition.definition import StateDef, StateForm, StateRef, ValueKind
from arroyo_dagster.dataflow.definition.names import engine_table_error, mangled, state_accessor
from arroyo_dagster.dataflow.definition.reading_types import read_halves, unsupported_value
from arroyo_dagster.dataflow.definition.shapes import optional_text, text_of
from arroyo_dagster.dataflow.definition.types import (
    KEY_TYPES,
    CompositeType,
    KeyedType,
    NamedType,
    PlainType,
    PrimitiveType,
    RowType,
    ScalarType,
    Scope,
    TypeDef,
    same_name,
)
from arroyo_dagster.dataflow.definition.windows import WindowDef
from arroyo_dagster.dataflow.definition.yaml_tree import Node
from arroyo_dagster.state.model.ids import NAME_RULE, is_name


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A `states` block and its owner. `kind`: service or package."""

    owner: str
    kind: str
    node: Node
    window: WindowDef | None = None


@dataclass(slots=True)
class States:
    """The states of all services.

    Attributes:
        imported_states: the states of imported functions, by service; None if they are unknown
            because a package was not loaded.
        whole: the states without errors, by owner and name.
        named: the nodes of all states, also of those with errors, by owner and name.
    """

    imported_states: Mapping[str, Mapping[str, StateDef] | None] = field(default_factory=dict)
    whole: dict[str, dict[str, StateDef]] = field(default_factory=dict)
    named: dict[str, dict[str, Node]] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class StateReader:
    """Reads `states` blocks; errors are reported at their nodes.

    Attributes:
        type_lines: the line of each type of the document, by its `same_name`.
        extended: whether values may be scalars that SDF's own engine rejects.
    """

    scope: Scope
    api_version: str
    type_lines: Mapping[str, int]
    extended: bool

    def read(self, block: Block, states: States) -> None:
        """Read the states of an owner, and add them to those of the document."""
        whole = states.whole.setdefault(block.owner, {})
        named = states.named.setdefault(block.owner, {})
        for name, node in _entries(block):
            self._check_name(block, name, node)
            state = self._entry(block, name, node)
            for other, earlier in named.items():
                if state_accessor(other) != state_accessor(name):
                    continue
                if other != name or state is None or whole.get(name) != state:
                    where = f"in line {earlier.line}, as `{other}`"
                    node.report("E22", f"state `{name}` is already defined {where}")
            named.setdefault(name, node)
            if state is not None:
                whole.setdefault(name, state)

    def _check_name(self, block: Block, name: str, node: Node) -> None:
        problem = None
        if not name.strip():
            problem = "the name of a state is empty"
        elif not is_name(name):
            problem = f"state `{name!r:.80}` cannot be the name of a table: {NAME_RULE}"
        elif (line := self.type_lines.get(same_name(name))) is not None:
            problem = f"state `{name}` has the name of the type in line {line}; rename one"
        elif not node.members.keys() & {"from", "system"}:  # the service keeps a table of it
            problem = engine_table_error(name, windowed=block.window is not None)
        if problem is not None:
            node.report("E21", problem)

    # ---- one entry -------------------------------------------------------------------------------

    def _entry(self, block: Block, name: str, node: Node) -> StateDef | None:
        forms = [key for key in ("type", "from", "system") if key in node.members]
        words = [node.members[key] for key in forms]
        wrong = next((word for word in words if word.value is not None and word.text is None), None)
        problem = None
        if not isinstance(node.value, dict):
            problem = f"expected a mapping, found {node.kind}"
        elif wrong is not None:
            problem = f"`{forms[words.index(wrong)]}` is {wrong.kind}; expected text"
        elif len(forms) > 1:
            both = " and ".join(f"`{key}`" for key in forms)
            problem = f"{both} contradict each other; keep one"
        elif forms in (["from"], ["system"]) and block.kind == "package":
            problem = f"a package's states are typed, not `{forms[0]}`"
        if problem is not None:
            _invalid(block, name, wrong or node, problem)
            return None
        readers = {"type": self._typed, "from": self._reference, "system": self._system}
        return readers[forms[0] if forms else "type"](block, name, node)

    def _base(self, block: Block, name: str, node: Node, form: StateForm) -> StateDef:
        table = mangled(name)
        return StateDef(
            name=name,
            owner=block.owner,
            form=form,
            accessor=state_accessor(name),
            table=table,
            aliases=() if table == name else (name,),
            window=block.window if form is StateForm.TYPED else None,
            api_version=self.api_version,
            path=node.path,
            line=node.line,
        )

    def _reference(self, block: Block, name: str, node: Node) -> StateDef | None:
        text = text_of(node, "from") or ""
        problem = _reference_error(text)
        if problem is not None:
            message = f"state `{name}` comes from `{text}`: {problem}; expected `<service>.<state>`"
            node.report("E15", message, key="from")
            return None
        service, _, state = text.partition(".")
        base = self._base(block, name, node, StateForm.REFERENCE)
        return replace(base, ref=StateRef(service, state))

    def _system(self, block: Block, name: str, node: Node) -> StateDef | None:
        system = text_of(node, "system") or ""
        if not system.strip():
            node.report("E17", "`system` cannot be empty", key="system")
            return None
        return replace(self._base(block, name, node, StateForm.SYSTEM), system=system)

    # ---- a typed state ---------------------------------------------------------------------------

    def _typed(self, block: Block, name: str, node: Node) -> StateDef | None:
        base = replace(self._base(block, name, node, StateForm.TYPED), was=_was(name, node))
        kind = text_of(node, "type") or "_"
        if kind in ("keyed-state", "key-value"):
            return self._of_halves(base, node, *read_halves(node))
        named = self.scope.resolve(NamedType(kind))
        base = replace(base, declared=NamedType(kind))
        if named.problem is None and named.type is None:
            return base
        if isinstance(named.type, KeyedType):
            return self._of_halves(base, node, named.type.key, named.type.value)
        message = (
            f"state `{name}` of {block.kind} `{block.owner}` must be a key value type "
            f"(`type: keyed-state`), found type `{kind}`"
        )
        node.report("E11", message, key="type")
        return None

    def _of_halves(
        self, base: StateDef, node: Node, key: TypeDef | None, value: TypeDef | None
    ) -> StateDef | None:
        """Return the state with a key and a value type; each is checked if the other fails too."""
        holder = node.get("properties")
        key_node, value_node = holder and holder.get("key"), holder and holder.get("value")
        with_key = None if key is None else self._with_key(base, key, key_node or node)
        whole = with_key or base
        done = None if value is None else self._with_value(whole, value, value_node or node)
        if key is None or value is None or with_key is None or done is None:
            return None
        convert = None
        if done.scalar_type is not None and value_node is not None:
            convert = optional_text(value_node, "convert")
        return replace(
            done, declared=base.declared or KeyedType(key=key, value=value), convert=convert
        )

    def _with_key(self, base: StateDef, declared: TypeDef, node: Node) -> StateDef | None:
        resolved = self.scope.resolve(declared)
        problem, key_type = resolved.problem, resolved.type
        if problem is not None:
            problem = f"key type of state `{base.name}`: {problem}"
        elif key_type is None:
            return base
        elif isinstance(key_type, ScalarType) and key_type.can_be_key:
            return replace(base, key_type=key_type)
        else:
            problem = (
                f"key type `{_named(declared)}` of state `{base.name}` is not hashable; expected "
                f"one of {', '.join(KEY_TYPES)}"
            )
        node.report("E14", problem, key="type")
        return None

    def _with_value(self, base: StateDef, declared: TypeDef, node: Node) -> StateDef | None:
        resolved = self.scope.resolve(declared)
        value_type = resolved.type
        if resolved.problem is not None:
            node.report("E23", f"value of state `{base.name}`: {resolved.problem}", key="type")
            return None
        if value_type is None:
            return base
        if isinstance(value_type, RowType):
            return replace(
                base, value_kind=ValueKind.ROW, columns=value_type.columns, ttl_ms=value_type.ttl_ms
            )
        if isinstance(value_type, ScalarType | PrimitiveType):
            return self._with_scalar(base, value_type, node)
        node.report("E13", unsupported_value(_named(declared)), key="type")
        return None

    def _with_scalar(
        self, base: StateDef, value: ScalarType | PrimitiveType, node: Node
    ) -> StateDef | None:
        primitive = value if isinstance(value, PrimitiveType) else PrimitiveType(type=value)
        scalar, ttl_ms = primitive.type, primitive.ttl_ms
        number, key, problem, extended = "E13", "type", "", set()
        if scalar is not ScalarType.U32 and not (primitive is value and scalar is ScalarType.I32):
            extended.add("scalar")
            problem = (
                f"unsupported type for value: `{scalar.value}`; SDF takes u32, and a primitive i32"
            )
        if ttl_ms is not None:
            extended.add("ttl")
            number, key = "E18", "ttl"
            problem = (
                f"ttl of the primitive state `{base.name}`: SDF has none, and would keep its values"
            )
        if extended and not self.extended:
            accepted = "This package reads it as an extension with extended=True"
            node.report(number, f"{problem}. {accepted} (--accept extended)", key=key)
            return None
        return replace(
            base,
            value_kind=ValueKind.SCALAR,
            scalar_type=scalar,
            ttl_ms=ttl_ms,
            extended=base.extended | extended,
        )


def _entries(block: Block) -> Iterator[tuple[str, Node]]:
    node = block.node
    if isinstance(node.value, dict):
        yield from node.members.items()
    elif not isinstance(node.value, tuple):
        _invalid(block, "", node, f"the states are {node.kind}; expected a mapping")
    for item in node.items:
        name, origin = item.get("name"), text_of(item, "from")
        if name is not None and name.text is not None:
            yield name.text, item
        elif name is None and origin:
            yield origin.rpartition(".")[2], item
        else:
            _invalid(block, "", item, "an entry of a list needs a `name`")


def _invalid(block: Block, name: str, node: Node, why: str) -> None:
    what = f"state `{name}` of {block.kind} `{block.owner}`" if name else f"`{block.owner}`"
    node.report("E10", f"Invalid state definition: {what}: {why}")


def _was(name: str, node: Node) -> tuple[str, ...]:
    """Return the earlier names of a state, from a text or a list of texts."""
    former = node.get("was")
    if former is None:
        return ()
    items = former.items if isinstance(former.value, tuple) else (former,)
    names = tuple(item.text for item in items if item.text and item.text.strip())
    if len(names) < len(items) or not names:
        message = f"state `{name}`: `was` is {former.kind}; expected an earlier name of it"
        node.report("E10", message, key="was")
    if name in names:
        message = f"state `{name}`: `was` is its present name; expected an earlier one"
        node.report("E10", message, key="was")
    return names


def _reference_error(text: str) -> str | None:
    if not text.strip():
        return "it is empty"
    if "." not in text:
        return "there is no dot"
    service, _, state = text.partition(".")
    if "." in state:
        return "there are more than two segments"
    missing = [name for name, half in (("service", service), ("state", state)) if not half.strip()]
    return (
        f"the {' and the '.join(missing)} before or after the dot is missing" if missing else None
    )


def _named(declared: TypeDef) -> str:
    if isinstance(declared, NamedType):
        return declared.name
    if isinstance(declared, ScalarType | PlainType):
        return str(declared.value)
    if isinstance(declared, CompositeType):
        return declared.kind
    return "keyed-state" if isinstance(declared, KeyedType) else "arrow-row"
