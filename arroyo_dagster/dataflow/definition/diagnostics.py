"""The errors and warnings of a definition, collected and reported together.

Source: sdf-states.md 9. The error numbers and class names are SDF's, so that its users know them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from arroyo_dagster.errors import DefinitionError

_KINDS = {
    "VersionError": "E01 E02",
    "ParseError": "E03 E04 E06",
    "StateDefinitionError": "E10 E11 E12 E13 E14 E17 E19 E20 E21 E22",
    "StateReferenceError": "E15 E16",
    "DurationError": "E18",
    "TypeReferenceError": "E23",
    "DefinitionError": "E05 E24 E36 E39",
    "OperatorError": "E25 E27 E28 E29 E38",
    "PackageError": "E30 E31 E32 E33 E35",
    "Unsupported": "E34",
    "WindowError": "E37",
    "UnboundOperatorError": "E26",
    "StateAccessError": "E44",
    "SqlError": "E46",
}
KIND_OF_NUMBER = {number: kind for kind, numbers in _KINDS.items() for number in numbers.split()}

MOST_DIAGNOSTICS = 1000
"""The maximum number of errors, and of warnings, that are kept. It bounds the memory when a
generated file has one error per line."""


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Diagnostic:
    """One error or warning.

    Attributes:
        line, column: the position, counted from 1.
        path: the YAML path, such as `services.count.states.hits.properties.value`.
        number: a number of the errors table (E01…); for a warning, its rule (L3, E40…).
        message: what was expected and what was found.
    """

    line: int
    column: int
    path: str
    number: str
    message: str

    @property
    def kind(self) -> str:
        """The class name of the number in the errors table; `Warning` for a warning."""
        return KIND_OF_NUMBER.get(self.number, "Warning")

    @property
    def place(self) -> str:
        """The line and the path, as they precede the message."""
        return f"line {self.line}: " + (f"{self.path}: " if self.path else "")


class Diagnostics:
    """Collects errors and warnings while a definition is read."""

    def __init__(self) -> None:
        self._found: dict[Diagnostic, None] = {}
        self._warnings: dict[Diagnostic, None] = {}
        self._softened = False

    def add(self, diagnostic_at: Diagnostic, *, softened: bool = True) -> None:
        """Add an error; an equal one is kept once.

        Inside the block of `softened`, it becomes a warning, unless `softened` is False here.
        """
        if self._softened and softened:
            self.warn(diagnostic_at)
        elif len(self._found) < MOST_DIAGNOSTICS:
            self._found[diagnostic_at] = None

    def warn(self, warning: Diagnostic) -> None:
        """Add a warning: something that is accepted but is probably a mistake."""
        if len(self._warnings) < MOST_DIAGNOSTICS:
            self._warnings[warning] = None

    @contextmanager
    def softened(self, when: bool = True) -> Iterator[None]:
        """Turn errors into warnings within the block, for content that need not be valid.

        Args:
            when: False = no effect, also inside an outer block.
        """
        before, self._softened = self._softened, when or self._softened
        try:
            yield
        finally:
            self._softened = before

    @property
    def found(self) -> tuple[Diagnostic, ...]:
        """The errors in the order of the text."""
        return tuple(sorted(self._found))

    def take(self) -> tuple[Diagnostic, ...]:
        """Return the errors in the order of the text, and forget them."""
        errors, self._found = self.found, {}
        return errors

    @property
    def warnings(self) -> tuple[Diagnostic, ...]:
        """The warnings in the order of the text."""
        return tuple(sorted(self._warnings))

    def raise_if_any(self, what: str, file: str | None = None) -> None:
        """Raise if there is at least one error.

        Raises:
            InvalidDefinition: with all errors.
        """
        if self._found:
            raise InvalidDefinition(what, self.found, file=file, warnings=self.warnings)


class InvalidDefinition(DefinitionError):
    """A definition has errors; `diagnostics` has all of them, in the order of the text.

    Args:
        what: the kind of document: `dataflow`, `package`, `bindings` or `document`.
        diagnostics: at least one.
        file: the path of the file, if known.
        warnings: what was accepted; it may explain the errors.
    """

    def __init__(
        self,
        what: str,
        diagnostics: Sequence[Diagnostic],
        *,
        file: str | None = None,
        warnings: Sequence[Diagnostic] = (),
    ) -> None:
        self.what = what
        self.diagnostics = tuple(diagnostics)
        self.warnings = tuple(warnings)
        first = self.diagnostics[0]
        count = f"{len(self.diagnostics)} error{('s' if len(self.diagnostics) > 1 else '')}"
        super().__init__(
            f"the {what} failed validation: {count}\n{render(self.diagnostics, self.warnings)}",
            next_step="correct the YAML at the named lines",
            file=file,
            path=first.path,
            line=first.line,
            number=first.number,
        )

    def __str__(self) -> str:
        # The tree has every path and line; the facts would only repeat those of the first error.
        where = f"{self.facts['file']}: " if "file" in self.facts else ""
        return f"{where}{self.message}\nNext: {self.next_step}"

    def __reduce__(self) -> tuple[object, ...]:
        file = str(self.facts["file"]) if "file" in self.facts else None
        rebuilt = partial(InvalidDefinition, file=file, warnings=self.warnings)
        return (rebuilt, (self.what, self.diagnostics))

    def with_file(self, file: str) -> InvalidDefinition:
        """Return the same error with the path of the file."""
        return InvalidDefinition(self.what, self.diagnostics, file=file, warnings=self.warnings)


_OBJECTS = {
    "services": "service",
    "states": "state",
    "types": "type",
    "topics": "topic",
    "functions": "function",
    "imports": "import",
}


def render(diagnostics: Sequence[Diagnostic], warnings: Sequence[Diagnostic] = ()) -> str:
    """Format errors as an indented tree: the kind and name of each object, then its errors.

    Warnings, which may explain errors, are between them in the order of the text.
    """
    found: dict[str, list[str]] = {}
    lines = [(one, "") for one in diagnostics] + [(one, "warning ") for one in warnings]
    for one, severity in sorted(lines):
        line = f"    {severity}{one.number} {one.place}{one.message}"
        found.setdefault(_heading(one.path), []).append(line)
    return "\n".join(f"  {heading}\n" + "\n".join(of) for heading, of in found.items())


def _heading(path: str) -> str:
    root, _, rest = path.partition(".")
    if root in _OBJECTS and rest:
        return f"{_OBJECTS[root]} `{rest.partition('.')[0]}`"
    return f"`{root}`" if root else "document"
