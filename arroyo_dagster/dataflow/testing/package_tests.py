"""The `tests` section of a package: calls of its functions with the expected results.

An entry has these keys:

| key | meaning |
|---|---|
| `name`, `function` | the name of the test, the function that it calls |
| `states` | the content of states before the call: by state, then key, a scalar or a row |
| `value`, `key`, `state-key` | the record, its key, and the key of the rows that accessors return |
| `expect` | the exact result; for flat-map a list; absent = any result |
| `expect-states` | the exact content of these states after the call |
| `expect-error` | a part of the error's message, or its number; the call then writes nothing |

A function of whole batches gets a batch: the records of a list, or one record. `state-key` is then
a key for each record, or one for all.

Source: sdf-states.md 5.3, proposed extension.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from arroyo_dagster.dataflow.definition.definition import Package
from arroyo_dagster.dataflow.definition.grammar import PACKAGE_TEST
from arroyo_dagster.dataflow.definition.packages import visible_states
from arroyo_dagster.dataflow.definition.types import same_name
from arroyo_dagster.dataflow.definition.yaml_tree import Node
from arroyo_dagster.dataflow.testing.runner import MISSING, Trial
from arroyo_dagster.dataflow.testing.section import (
    Difference,
    TestOutcome,
    arguments_of,
    as_text,
    check_expectation,
    check_known,
    compared,
    error_text,
    line_at,
    read_entries,
    row_texts,
)
from arroyo_dagster.errors import ArroyoStateError

_EXPECTATIONS = ("expect", "expect-states", "expect-error")


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
    entry: Node = field(compare=False, repr=False)


def read_tests(package: Package, packages: Mapping[str, Package]) -> list[PackageTest]:
    """Return the tests of a package; empty if it has no such section.

    Args:
        package: the package.
        packages: the packages that it imports, by id.

    Raises:
        InvalidDefinition: the section is invalid, or names functions or states that do not exist;
            with all errors.
    """
    states = [*visible_states(package, packages)]

    def check(entry: Node) -> None:
        name = entry.get("function")
        known = [same_name(one) for one in package.functions]
        if name is not None and name.text is not None and same_name(name.text) not in known:
            listed = ", ".join(package.functions) or "none"
            said = f"the package has no function `{name.text}`; it has {listed}"
            name.report("E04", said)
        for key in ("states", "expect-states"):
            check_known(entry.get(key), "state", states)
        if entry.given("expect") and entry.given("expect-error"):
            said = "has both `expect` and `expect-error`; give one"
            entry.report("E04", said)
        check_expectation(entry, _EXPECTATIONS, nullable=("expect",))

    nullable = ("value", "state-key", "expect")
    return [
        PackageTest(**arguments_of(entry, PACKAGE_TEST, nullable=nullable), entry=entry)
        for entry in read_entries(package, PACKAGE_TEST, check)
    ]


def run_test(test: PackageTest, trial: Trial) -> TestOutcome:
    """Run one test on fresh states.

    Args:
        test: the test.
        trial: a trial with empty states.
    """
    try:
        found = _run(test, trial)
    except ArroyoStateError as error:  # a value that does not fit its state
        found = [Difference(line=test.entry.line, what=error_text(error))]
    return TestOutcome(
        name=test.name, function=test.function, line=test.entry.line, differences=tuple(found)
    )


def _run(test: PackageTest, trial: Trial) -> list[Difference]:
    for state, rows in test.states.items():
        for key, value in rows.items():
            trial.add(state, key, value)
    found = _of_call(test, trial)
    for state, rows in test.expect_states.items():
        line = line_at(test.entry, "expect-states", state)
        held = trial.states[trial.state(state).name]
        found += compared(line, f"state {state}", row_texts(rows), row_texts(held))
    return found


def _of_call(test: PackageTest, trial: Trial) -> list[Difference]:
    try:
        result = trial.call(test.function, test.value, key=test.key, state_key=test.state_key)
    except Exception as error:
        number = error.facts.get("number") if isinstance(error, ArroyoStateError) else None
        said = f"{type(error).__name__}: {error}"
        if test.expect_error is None:
            return [Difference(line=test.entry.line, what="it failed", lines=(f"+ {said}",))]
        if test.expect_error == number or test.expect_error in said:
            return []
        expected = f"an error with {test.expect_error!r}"
        return compared(line_at(test.entry, "expect-error"), "the error", [expected], [said])
    if test.expect_error is not None:
        expected = f"an error with {test.expect_error!r}"
        line = line_at(test.entry, "expect-error")
        return compared(line, "it did not fail", [expected], [as_text(result)])
    if test.expect is MISSING:
        return []
    line = line_at(test.entry, "expect")
    return compared(line, "the result", [as_text(test.expect)], [as_text(result)])
