"""Read `states` blocks from YAML, and resolve their references.

Source: sdf-states.md 2.3 to 2.6, 2.9 to 2.12; errors E10 to E23.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from arroyo_dagster.dataflow.definition.definition import StateDef, StateForm, StateRef, ValueKind
from arroyo_dagster.dataflow.definition.diagnostics import Diagnostics
from arroyo_dagster.dataflow.definition.names import engine_table_error, mangled, state_accessor
from arroyo_dagster.dataflow.definition.reading_types import TypeReader, unsupported_value
from arroyo_dagster.dataflow.definition.scope import Scope
from arroyo_dagster.dataflow.definition.shapes import text_of
from arroyo_dagster.dataflow.definition.types import (
    KEY_TYPES,
    CompositeType,
    KeyedType,
    NamedType,
    PlainType,
    PrimitiveType,
    RowType,
    ScalarType,
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


class StateReader:
    """Reads `states` blocks; errors are added to `diagnostics`.

    Args:
        type_lines: the line of each type of the document, by name.
        extended: whether values may be scalars that SDF's own engine rejects.
    """

    def __init__(
        self,
        diagnostics: Diagnostics,
        types: TypeReader,
        scope: Scope,
        *,
        api_version: str,
        type_lines: Mapping[str, int],
        extended: bool,
    ) -> None:
        self._mistakes = diagnostics
        self._types = types
        self._scope = scope
        self._api_version = api_version
        self._type_lines = {same_name(name): line for name, line in type_lines.items()}
        self._extended = extended

    def read(
        self, blocks: list[Block], imported_states: Mapping[str, Mapping[str, StateDef] | None]
    ) -> States:
        """Read all blocks of a document, and link the references to their owners.

        Args:
            blocks: the `states` blocks of all owners.
            imported_states: as in `States`.
        """
        states = States({}, {}, imported_states)
        for block in blocks:
            whole = states.whole.setdefault(block.owner, {})
            named = states.named.setdefault(block.owner, {})
            for name, node in self._entries(block):
                self._add(block, name, node, whole, named)
        Linking(self._mistakes, states).link()
        return states

    def _add(
        self,
        block: Block,
        name: str,
        node: Node,
        whole: dict[str, StateDef],
        named: dict[str, Node],
    ) -> None:
        self._check_name(block, name, node)
        state = self._entry(block, name, node)
        for other, earlier in named.items():
            if state_accessor(other) != state_accessor(name):
                continue
            if other != name or state is None or whole.get(name) != state:
                message = f"state `{name}` is already defined in line {earlier.line}, as `{other}`"
                self._mistakes.add(node.diagnostic_at("E22", message))
        named.setdefault(name, node)
        if state is not None:
            whole.setdefault(name, state)

    def _check_name(self, block: Block, name: str, node: Node) -> None:
        if not name.strip():
            self._mistakes.add(node.diagnostic_at("E21", "the name of a state is empty"))
        elif not is_name(name):
            message = f"state `{name!r:.80}` cannot be the name of a table: {NAME_RULE}"
            self._mistakes.add(node.diagnostic_at("E21", message))
        elif (line := self._type_lines.get(same_name(name))) is not None:
            message = f"state `{name}` has the name of the type in line {line}; rename one"
            self._mistakes.add(node.diagnostic_at("E21", message))
        elif not node.members.keys() & {"from", "system"}:  # the service keeps a table of it
            taken = engine_table_error(name, windowed=block.window is not None)
            if taken is not None:
                self._mistakes.add(node.diagnostic_at("E21", taken))

    # ---- one entry -------------------------------------------------------------------------------

    def _entries(self, block: Block) -> Iterator[tuple[str, Node]]:
        node = block.node
        if isinstance(node.value, dict):
            yield from node.members.items()
            return
        if not isinstance(node.value, tuple):
            self._invalid(block, "", node, f"the states are {node.kind}; expected a mapping")
        for item in node.items:
            name, origin = item.get("name"), item.get("from")
            if name is not None and name.text is not None:
                yield name.text, item
            elif name is None and origin is not None and origin.text:
                yield origin.text.rpartition(".")[2], item
            else:
                self._invalid(block, "", item, "an entry of a list needs a `name`")

    def _invalid(self, block: Block, name: str, node: Node, why: str) -> None:
        what = f"state `{name}` of {block.kind} `{block.owner}`" if name else f"`{block.owner}`"
        self._mistakes.add(node.diagnostic_at("E10", f"Invalid state definition: {what}: {why}"))

    def _entry(self, block: Block, name: str, node: Node) -> StateDef | None:
        if not isinstance(node.value, dict):
            self._invalid(block, name, node, f"expected a mapping, found {node.kind}")
            return None
        forms = [key for key in ("type", "from", "system") if key in node.members]
        for key in forms:
            word = node.members[key]
            if word.value is not None and word.text is None:
                self._invalid(block, name, word, f"`{key}` is {word.kind}; expected text")
                return None
        if len(forms) > 1:
            both = " and ".join(f"`{key}`" for key in forms)
            self._invalid(block, name, node, f"{both} contradict each other; keep one")
            return None
        if forms in (["from"], ["system"]) and block.kind == "package":
            self._invalid(block, name, node, f"a package's states are typed, not `{forms[0]}`")
            return None
        if forms == ["from"]:
            return self._reference(block, name, node)
        return (
            self._system(block, name, node)
            if forms == ["system"]
            else self._typed(block, name, node)
        )

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
            api_version=self._api_version,
            path=node.path,
            line=node.line,
        )

    def _reference(self, block: Block, name: str, node: Node) -> StateDef | None:
        text = text_of(node, "from") or ""
        problem = _reference_error(text)
        if problem is not None:
            said = f"state `{name}` comes from `{text}`: {problem}; expected `<service>.<state>`"
            self._mistakes.add(node.diagnostic_at("E15", said, key="from"))
            return None
        service, _, state = text.partition(".")
        base = self._base(block, name, node, StateForm.REFERENCE)
        return replace(base, ref=StateRef(service, state))

    def _system(self, block: Block, name: str, node: Node) -> StateDef | None:
        named = text_of(node, "system") or ""
        if not named.strip():
            self._mistakes.add(node.diagnostic_at("E17", "`system` cannot be empty", key="system"))
            return None
        return replace(self._base(block, name, node, StateForm.SYSTEM), system=named)

    # ---- a typed state ---------------------------------------------------------------------------

    def _typed(self, block: Block, name: str, node: Node) -> StateDef | None:
        base = replace(self._base(block, name, node, StateForm.TYPED), was=self._was(name, node))
        word = node.get("type")
        kind = "_" if word is None or not word.text else word.text
        if kind in ("keyed-state", "key-value"):
            return self._of_halves(base, node, *self._types.halves(node))
        named = self._scope.resolve(NamedType(kind))
        if named.problem is None and named.type is None:
            return replace(base, declared=NamedType(kind))
        if isinstance(named.type, KeyedType):
            named_base = replace(base, declared=NamedType(kind))
            return self._of_halves(named_base, node, named.type.key, named.type.value)
        message = (
            f"state `{name}` of {block.kind} `{block.owner}` must be a key value type "
            f"(`type: keyed-state`), found type `{kind}`"
        )
        self._mistakes.add(node.diagnostic_at("E11", message, key="type"))
        return None

    def _was(self, name: str, node: Node) -> tuple[str, ...]:
        """Return the earlier names of a state, from a text or a list of texts."""
        found = node.get("was")
        if found is None:
            return ()
        items = found.items if isinstance(found.value, tuple) else (found,)
        names = tuple(item.text for item in items if item.text and item.text.strip())
        if len(names) < len(items) or not names:
            message = f"state `{name}`: `was` is {found.kind}; expected an earlier name of it"
            self._mistakes.add(node.diagnostic_at("E10", message, key="was"))
        if name in names:
            message = f"state `{name}`: `was` is its present name; expected an earlier one"
            self._mistakes.add(node.diagnostic_at("E10", message, key="was"))
        return names

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
            convert = self._types.shapes.optional_text(value_node, "convert")
        return replace(
            done, declared=base.declared or KeyedType(key=key, value=value), convert=convert
        )

    def _with_key(self, base: StateDef, declared: TypeDef, node: Node) -> StateDef | None:
        resolved = self._scope.resolve(declared)
        if resolved.problem is not None:
            message = f"key type of state `{base.name}`: {resolved.problem}"
            self._mistakes.add(node.diagnostic_at("E14", message, key="type"))
            return None
        if resolved.type is None:
            return base
        if not isinstance(resolved.type, ScalarType) or not resolved.type.can_be_key:
            message = (
                f"key type `{_named(declared)}` of state `{base.name}` is not hashable; expected "
                f"one of {', '.join(KEY_TYPES)}"
            )
            self._mistakes.add(node.diagnostic_at("E14", message, key="type"))
            return None
        return replace(base, key_type=resolved.type)

    def _with_value(self, base: StateDef, declared: TypeDef, node: Node) -> StateDef | None:
        resolved = self._scope.resolve(declared)
        if resolved.problem is not None:
            message = f"value of state `{base.name}`: {resolved.problem}"
            self._mistakes.add(node.diagnostic_at("E23", message, key="type"))
            return None
        found = resolved.type
        if found is None:
            return base
        if isinstance(found, RowType):
            return replace(
                base, value_kind=ValueKind.ROW, columns=found.columns, ttl_ms=found.ttl_ms
            )
        if isinstance(found, ScalarType | PrimitiveType):
            return self._with_scalar(base, found, node)
        self._mistakes.add(
            node.diagnostic_at("E13", unsupported_value(_named(declared)), key="type")
        )
        return None

    def _with_scalar(
        self, base: StateDef, found: ScalarType | PrimitiveType, node: Node
    ) -> StateDef | None:
        scalar = found.type if isinstance(found, PrimitiveType) else found
        ttl_ms = found.ttl_ms if isinstance(found, PrimitiveType) else None
        documented = isinstance(found, PrimitiveType) and scalar is ScalarType.I32
        extended = base.extended
        if ttl_ms is not None:
            extended = extended | {"ttl"}
            if not self._extended:
                message = (
                    f"ttl of the primitive state `{base.name}`: SDF has none, and would keep its "
                    "values. This package reads it as an extension with extended=True "
                    "(--accept extended)"
                )
                self._mistakes.add(node.diagnostic_at("E18", message, key="ttl"))
                return None
        if scalar is not ScalarType.U32 and not documented:
            extended = extended | {"scalar"}
            if not self._extended:
                message = (
                    f"unsupported type for value: `{scalar.value}`; SDF takes u32, and a "
                    "primitive i32. This package reads it as an extension with extended=True "
                    "(--accept extended)"
                )
                self._mistakes.add(node.diagnostic_at("E13", message, key="type"))
                return None
        return replace(
            base,
            value_kind=ValueKind.SCALAR,
            scalar_type=scalar,
            ttl_ms=ttl_ms,
            extended=extended,
        )


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


# ---- linking -------------------------------------------------------------------------------------
# Link the states of a dataflow: references to their owners, and table names that must be unique.
#
# Source: sdf-states.md 2.10; errors E16, E22.


@dataclass(slots=True)
class States:
    """The states of all services.

    Attributes:
        whole: the states without errors, by owner and name.
        named: the nodes of all states, also of those with errors, by owner and name.
        imported_states: the states of imported functions, by service; None if they are unknown
            because a package was not loaded.
    """

    whole: dict[str, dict[str, StateDef]]
    named: dict[str, dict[str, Node]]
    imported_states: Mapping[str, Mapping[str, StateDef] | None] = field(default_factory=dict)


class Linking:
    """Finds the owner of every reference, and checks that no two states share a table."""

    def __init__(self, diagnostics: Diagnostics, states: States) -> None:
        self._mistakes = diagnostics
        self._states = states

    def link(self) -> None:
        """Copy the owner's definition into each reference; remove references without an owner."""
        self._check_owners()
        for service, states in self._states.whole.items():
            for name, state in list(states.items()):
                if state.ref is None:
                    continue
                linked = self._linked(service, state, state.ref)
                if linked is None:
                    del states[name]
                else:
                    states[name] = linked

    def _check_owners(self) -> None:
        owners: dict[str, StateDef] = {}
        for states in self._states.whole.values():
            for state in states.values():
                if state.form is not StateForm.TYPED:
                    continue
                first = owners.setdefault(state.table, state)
                if first.owner != state.owner:
                    self._add(
                        "E22",
                        state,
                        f"state `{state.name}` is already defined by `{first.owner}` in line "
                        f"{first.line}: both are the table `{state.table}`; rename one, or refer "
                        f"to it with `from: {first.owner}.{first.name}`",
                    )

    def _add(self, number: str, state: StateDef, message: str) -> None:
        node = self._states.named[state.owner][state.name]
        self._mistakes.add(node.diagnostic_at(number, message))

    def _linked(self, service: str, state: StateDef, ref: StateRef) -> StateDef | None:
        owner = self._states.whole.get(ref.service, {}).get(ref.state)
        if owner is None and ref.state in self._states.named.get(ref.service, {}):
            return None  # it exists, and its errors were reported
        if owner is None and ref.service != service:
            imported_states = self._states.imported_states.get(ref.service, {})
            if imported_states is None:
                return state
            owner = imported_states.get(ref.state)
        if owner is None or owner.form is not StateForm.TYPED or ref.service == service:
            self._add("E16", state, self._missing(service, state, ref, owner))
            return None
        # The table has the owner's name; the local name is an alias.
        names = dict.fromkeys((*owner.aliases, state.table, state.name))
        names.pop(owner.table, None)
        return replace(
            owner,
            name=state.name,
            form=StateForm.REFERENCE,
            declared=None,
            ref=ref,
            accessor=state.accessor,
            aliases=tuple(names),
            api_version=state.api_version,
            path=state.path,
            line=state.line,
        )

    def _missing(self, service: str, state: StateDef, ref: StateRef, owner: StateDef | None) -> str:
        said = f"state `{state.name}` of service `{service}` comes from `{ref}`"
        if ref.service == service:
            return f"{said}: the service itself; `{ref}` is not defined in the dataflow elsewhere"
        if owner is not None:
            return (
                f"{said}: that is a {owner.form.value} itself, not defined in the dataflow by "
                f"`{ref.service}`; name the owner"
            )
        known = [
            f"{one.owner}.{one.name}"
            for states in self._states.whole.values()
            for one in states.values()
            if one.form is StateForm.TYPED
        ]
        near = difflib.get_close_matches(str(ref), known, n=3)
        hint = ", ".join(f"`{one}`" for one in near or sorted(known)[:10]) or "none"
        meant = "did you mean" if near else "there are"
        return f"{said}: `{ref}` is not defined in the dataflow; {meant} {hint}"
