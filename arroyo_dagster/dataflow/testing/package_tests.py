"""The `tests` section of a package: calls of its functions with the expected results.

This section is an extension of this project; SDF ignores it. An entry has these keys:

| key | meaning |
|---|---|
| `name`, `function` | the name of the test, the function that it calls |
| `states` | the content of states before the call: by state, then key, a scalar or a row |
| `value`, `key`, `state-key` | the record, its key, and the key of the rows that accessors return |
| `expect` | the exact result; for flat-map a list; absent = any result |
| `expect-states` | the exact content of these states after the call |
| `expect-error` | a part of the error's message, or its number; the call then writes nothing |

Source: sdf-states.md 5.3, proposed extension.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from arroyo_dagster.dataflow.definition.definition import Package
from arroyo_dagster.dataflow.definition.diagnostics import Diagnostic, InvalidDefinition
from arroyo_dagster.dataflow.testing.runner import MISSING, Trial
from arroyo_dagster.errors import ArroyoStateError

_KEYS = {
    *("name", "function", "states", "value", "key", "state-key"),
    *("expect", "expect-states", "expect-error"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PackageTest:
    """One entry of the section. `MISSING` = the key is absent."""

    name: str
    function: str
    states: dict[str, dict[str, Any]] = field(default_factory=dict)
    value: Any = MISSING
    key: Any = None
    state_key: Any = MISSING
    expect: Any = MISSING
    expect_states: dict[str, dict[str, Any]] = field(default_factory=dict)
    expect_error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TestOutcome:
    """The outcome of a test. `problem`: what was expected and found; None = it passed."""

    __test__ = False  # not a test class of pytest

    name: str
    function: str
    problem: str | None = None

    @property
    def passed(self) -> bool:
        """Whether the test passed."""
        return self.problem is None


def read_tests(package: Package) -> list[PackageTest]:
    """Return the tests of a package; empty if it has no such section.

    Raises:
        InvalidDefinition: the section is invalid; with all errors.
    """
    section = package.kept.get("tests")
    entries = [] if section is None else section.value
    diagnostics: list[tuple[str, str]] = []
    if not isinstance(entries, list):
        diagnostics.append(("tests", "expected a list"))
        entries = []
    found = []
    for at, entry in enumerate(entries):
        problems = [(f"tests[{at}]{where}", said) for where, said in _entry_errors(entry, package)]
        diagnostics += problems
        if not problems:
            found.append(_test(entry))
    if diagnostics:
        raise InvalidDefinition(
            "package",
            [
                Diagnostic(line=1, column=1, path=path, number="E04", message=message)
                for path, message in diagnostics
            ],
        )
    return found


def _entry_errors(entry: Any, package: Package) -> list[tuple[str, str]]:
    if not isinstance(entry, dict):
        return [("", "expected a mapping")]
    found = [
        (f".{key}", "expected text")
        for key in ("name", "function")
        if not isinstance(entry.get(key), str)
    ]
    unknown = sorted(set(entry) - _KEYS)
    found += [(f".{key}", f"unknown key; expected {', '.join(sorted(_KEYS))}") for key in unknown]
    for key in ("states", "expect-states"):
        states = entry.get(key, {})
        if not isinstance(states, dict) or not all(
            isinstance(one, dict) for one in states.values()
        ):
            found.append((f".{key}", "expected what each state holds by key"))
    if not isinstance(entry.get("expect-error", ""), str):
        found.append((".expect-error", "expected text"))
    if "expect-error" in entry and "expect" in entry:
        found.append(("", "has both `expect` and `expect-error`; give one"))
    if not {"expect", "expect-states", "expect-error"} & set(entry):
        found.append(("", "expects nothing: give `expect`, `expect-states` or `expect-error`"))
    return found


def _test(entry: dict[str, Any]) -> PackageTest:
    return PackageTest(
        name=entry["name"],
        function=entry["function"],
        states=entry.get("states", {}),
        value=entry.get("value", MISSING),
        key=entry.get("key"),
        state_key=entry.get("state-key", MISSING),
        expect=entry.get("expect", MISSING),
        expect_states=entry.get("expect-states", {}),
        expect_error=entry.get("expect-error"),
    )


def run_test(test: PackageTest, trial: Trial) -> TestOutcome:
    """Run one test on fresh states.

    Args:
        test: the test.
        trial: a trial with empty states.
    """
    try:
        problem = _run(test, trial)
    except ArroyoStateError as error:  # the test names an unknown state or function
        problem = str(error)
    return TestOutcome(name=test.name, function=test.function, problem=problem)


def _run(test: PackageTest, trial: Trial) -> str | None:
    for state, rows in test.states.items():
        for key, value in rows.items():
            trial.add(state, key, value)
    trial.function(test.function)
    try:
        found = trial.call(test.function, test.value, key=test.key, state_key=test.state_key)
    except Exception as error:
        return _of_error(test, error)
    if test.expect_error is not None:
        return f"expected an error with {test.expect_error!r}, found {_render_value(found)}"
    if test.expect is not MISSING and not _same(found, test.expect):
        return f"expected {_render_value(test.expect)}, found {_render_value(found)}"
    for state, rows in test.expect_states.items():
        if state not in trial.states:
            return f"there is no state `{state}`"
        holds, expected = trial.states[state], {_key(key): row for key, row in rows.items()}
        if not _same(holds, expected):
            wanted, found = _render_value(expected), _render_value(holds)
            return f"expected state {state} to hold {wanted}, found {found}"
    return None


def _of_error(test: PackageTest, error: Exception) -> str | None:
    number = error.facts.get("number") if isinstance(error, ArroyoStateError) else None
    said = f"{type(error).__name__}: {error}"
    if test.expect_error is None:
        return f"raised {said}"
    if test.expect_error == number or test.expect_error in said:
        return None
    return f"expected an error with {test.expect_error!r}, raised {said}"


def _same(found: Any, expected: Any) -> bool:
    """Return whether two values are equal as JSON: 1 differs from true, 1.0 equals 1."""
    if isinstance(found, bool) or isinstance(expected, bool):
        return found is expected
    if isinstance(found, dict) and isinstance(expected, dict):
        return found.keys() == expected.keys() and all(
            _same(found[key], expected[key]) for key in found
        )
    if isinstance(found, list | tuple) and isinstance(expected, list | tuple):
        return len(found) == len(expected) and all(map(_same, found, expected))
    return bool(found == expected)


def _key(key: Any) -> str:
    return str(key).lower() if isinstance(key, bool) else str(key)


def _render_value(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, sort_keys=True, default=str)


def run_tests(
    package: Package, fresh: Callable[[], Trial], only: Sequence[str] = ()
) -> list[TestOutcome]:
    """Run the tests of a package, each on fresh states.

    Args:
        package: the package.
        fresh: makes a trial with empty states.
        only: the names of the tests to run; empty = all.
    """
    tests = [test for test in read_tests(package) if not only or test.name in only]
    return [run_test(test, fresh()) for test in tests]
