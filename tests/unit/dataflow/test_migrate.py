"""Protects the rows of states whose definition changes: carried over, or the run refuses."""

from __future__ import annotations

from typing import Any

import pytest

from arroyo_dagster.dataflow.errors import StateSchemaError
from arroyo_dagster.dataflow.revisions.migrate import migrate, plan_migration, run_migration
from arroyo_dagster.errors import ConflictError
from arroyo_dagster.state import JobPaths, verify_job
from tests.dataflows import Flow, KilledAt, builder, definition, row_of
from tests.faulty_stores import Crash

BUMP = "counts().increment(1)"
ROWS = "row = counts()\nrow.n += 1\nrow.name = record\nrow.update()"
N_NAME = row_of(n="u32", name="string")


def flow_of(service: str, before: Flow | None = None, *more: str) -> Flow:
    text = definition("".join((service, *more)), converter="raw")
    if before is None:
        return Flow(text)
    return Flow(text, store=before.store, topics=before.topics, clock=before.clock)


def migrated(flow: Flow) -> Flow:
    """Carry the stored states over, as `sdf run --migrate` does before it runs."""
    list(migrate(flow.dataflow, flow.store))
    return flow


def refused(flow: Flow) -> StateSchemaError:
    """The error of a run without --migrate."""
    with pytest.raises(StateSchemaError) as error:
        _ = flow.pipelines
    assert error.value.facts["number"] == "E50"
    return error.value


def renamed(service: str, was: str = "counts", to: str = "visits") -> str:
    return service.replace(f"      {was}:\n", f"      {to}:\n        was: {was}\n").replace(
        f"{was}()", f"{to}()"
    )


@pytest.mark.parametrize("value", ["{type: u32}", N_NAME])
def test_a_renamed_state_keeps_its_rows(value: str) -> None:
    service = builder(ROWS if value == N_NAME else BUMP, value=value)
    before = flow_of(service).send("words", ["a", "b", "a"])
    known = before.views().view("build.counts").frame().rows()
    after = flow_of(renamed(service), before)
    error = refused(after)
    assert "state `counts` is now named `visits`" in str(error)
    assert "sdf run --migrate" in str(error)
    files = {one.path for one in before.store.list("test.flow") if "/table-" in one.path}
    migrated(after)
    assert after.views().view("build.visits").frame().rows() == known
    after.send("words", ["b", "c"])
    shown = {row[0]: row[1] for row in after.views().view("build.visits").frame().rows()}
    assert shown == {"a": 2, "b": 2, "c": 1}
    assert files <= {one.path for one in before.store.list("test.flow")}
    assert verify_job(after.store, JobPaths("build", "test.flow")).verdict.findings == ()


def test_a_dropped_state_is_carried_over_and_taken_back() -> None:
    before = flow_of(builder(BUMP)).send("words", ["a", "a"])
    other = builder("other().increment(1)", state="other")
    without = flow_of(other, before)
    error = refused(without)
    assert "state `counts` is stored, and no longer declared" in str(error)
    assert "add `was: counts` to it (line 14)" in str(error)
    assert "sdf clean DATAFLOW --state build/counts" in str(error)
    migrated(without).send("words", ["b"])
    assert without.cells("build.other") == {"b": 1}
    again = flow_of(builder(BUMP), without)
    assert "was dropped earlier" in str(refused(again))
    migrated(again)
    assert again.cells("build.counts") == {"a": 2}
    assert again.send("words", ["a"]).cells("build.counts") == {"a": 3}
    back = migrated(flow_of(other, again))
    assert back.cells("build.other") == {"b": 1}


@pytest.mark.parametrize(
    ("old", "new", "values", "expected"),
    [
        ("u8", "i64", [1, 255], [1, 255]),
        ("i64", "u8", [0, 255], [0, 255]),
        ("u32", "f64", [7], [7.0]),
        ("f64", "i32", [7.0, -2.0], [7, -2]),
        ("f64", "f32", [0.1], [pytest.approx(0.1)]),
        ("string", "i64", ["12", "-3"], [12, -3]),
        ("string", "f64", ["1.5", "2"], [1.5, 2.0]),
        ("string", "bool", ["true", "false"], [True, False]),
        ("i64", "string", [5, -5], ["5", "-5"]),
        ("bool", "u8", [True, False], [1, 0]),
        ("bool", "string", [True, False], ["true", "false"]),
    ],
)
@pytest.mark.parametrize("kind", ["scalar", "row"])
def test_values_become_those_of_another_type(
    kind: str, old: str, new: str, values: list[Any], expected: list[Any]
) -> None:
    listed = repr(values)
    if kind == "scalar":
        body, forms = (
            f"counts().set({listed}[int(record)])",
            [f"{{type: {one}}}" for one in (old, new)],
        )
    else:
        body = f"row = counts()\nrow.v = {listed}[int(record)]\nrow.update()"
        forms = [row_of(v=one) for one in (old, new)]
    before = flow_of(builder(body, value=forms[0]))
    before.send("words", [str(at) for at in range(len(values))])
    assert before.metrics("build")["build_update"].failed == 0
    after = flow_of(builder("pass", value=forms[1]), before)
    assert "--migrate" in str(refused(after))
    migrated(after)
    name = "value" if kind == "scalar" else "v"
    assert after.views().view("build.counts").frame()[name].to_list() == expected
    assert after.send("words", ["0"]).metrics("build")["build_update"].succeeded == len(values) + 1
    assert verify_job(after.store, JobPaths("build", "test.flow")).verdict.passed


@pytest.mark.parametrize(
    ("old", "new", "values", "said"),
    [
        ("i64", "u8", [1, 256, -1], "2 values do not fit: key '1', `value`: 256 is no u8"),
        ("string", "i64", ["1", "x"], "1 values do not fit: key '1', `value`: 'x' is no i64"),
        ("f64", "i64", [1.5], "1.5 is no i64"),
        ("u64", "f64", [2**53 + 1], "is no f64"),
        ("string", "f64", ["nan"], "'nan' is no f64"),
    ],
)
def test_values_that_do_not_fit_are_named_and_nothing_changes(
    old: str, new: str, values: list[Any], said: str
) -> None:
    body = f"counts().set({values!r}[int(record)])"
    before = flow_of(builder(body, value=f"{{type: {old}}}"))
    before.send("words", [str(at) for at in range(len(values))])
    objects = list(before.store.list("test.flow"))
    after = flow_of(builder("pass", value=f"{{type: {new}}}"), before)
    with pytest.raises(StateSchemaError) as error:
        plan_migration(after.dataflow, after.store)
    assert said in str(error.value)
    assert "`convert: <SQL over the stored columns>`" in str(error.value)
    assert list(before.store.list("test.flow")) == objects


@pytest.mark.parametrize(
    ("convert", "said"),
    [("nonesuch + 1", "stored columns: _key, old"), ("sum(", "cannot be computed")],
)
def test_a_conversion_that_cannot_be_computed_is_refused(convert: str, said: str) -> None:
    body = "row = counts()\nrow.old = 3\nrow.update()"
    before = flow_of(builder(body, value=row_of(old="u32"))).send("words", ["a"])
    value = f"{{type: arrow-row, properties: {{new: {{type: u32, convert: '{convert}'}}}}}}"
    after = flow_of(builder("pass", value=value), before)
    with pytest.raises(StateSchemaError, match=said):
        plan_migration(after.dataflow, after.store)


def test_deleted_rows_and_replaced_values_stay_deleted_and_replaced() -> None:
    body = (
        "row = counts()\n"
        "if record == 'gone': row.delete()\n"
        "else:\n    row.v = 'x' if counts().v == '' else '7'\n    row.update()"
    )
    before = flow_of(builder(body, value=row_of(v="string"), key_body="return 'k'"))
    before.send("words", ["a"]).send("words", ["gone"]).send("words", ["a"]).send("words", ["b"])
    assert before.rows("build.counts") == {"k": {"v": "7"}}
    after = migrated(flow_of(builder("pass", value=row_of(v="u32")), before))
    assert after.rows("build.counts") == {"k": {"v": 7}}


@pytest.mark.parametrize(
    ("old", "new", "keys", "fits"),
    [
        ("string", "u32", ["1", "20"], True),
        ("string", "u32", ["1", "007"], False),
        ("i64", "string", ["5"], True),
    ],
)
def test_keys_change_their_type_where_their_text_stays(
    old: str, new: str, keys: list[str], fits: bool
) -> None:
    before = flow_of(builder(BUMP, key=old)).send("words", keys)
    after = flow_of(builder(BUMP, key=new), before)
    if not fits:
        with pytest.raises(StateSchemaError, match="'007' is no u32"):
            plan_migration(after.dataflow, after.store)
        return
    assert migrated(after).send("words", keys[:1]).cells("build.counts")[keys[0]] == 2


WINDOWED = builder(BUMP).replace(
    "    partition:\n", "    window:\n      tumbling: {duration: 10s}\n"
    "      assign-timestamp: {run: 'def when(word, time): return int(word.split()[1])'}\n"
    "      partition:\n"
)  # fmt: skip


def windowed(state: str = "counts", value: str = "u32") -> str:
    head, _, tail = WINDOWED.partition("      partition:\n")
    indented = "\n".join(f"  {line}" if line else line for line in tail.splitlines())
    flush = f"\n      flush: {{run: 'def closing(): return str({state}())'}}\n"
    text = f"{head}      partition:\n{indented}{flush}    sinks: [{{type: topic, id: answers}}]\n"
    return text.replace("counts", state).replace("value: {type: u32}", f"value: {{type: {value}}}")


def test_open_and_closed_windows_of_a_renamed_and_converted_state_are_carried_over() -> None:
    before = flow_of(windowed())
    before.send("words", ["a 1000", "a 2000", "a 11000"])
    assert before.cells("build.counts") == {"a 2000": 1, "a 1000": 1}
    text = windowed("visits", "i64").replace("visits:\n", "visits:\n        was: counts\n", 1)
    after = migrated(flow_of(text, before))
    assert after.cells("build.visits") == {"a 2000": 1, "a 1000": 1}
    after.send("words", ["b 21000"])
    assert after.sinks["answers"].values == ["[('a 11000', 1)]"]
    assert after.cells("build.visits") == {"a 11000": 1}


def test_a_service_that_runs_meanwhile_is_not_migrated() -> None:
    before = flow_of(builder(BUMP)).send("words", ["a"])
    after = flow_of(renamed(builder(BUMP)), before)
    (plan,) = plan_migration(after.dataflow, after.store)
    before.send("words", ["b"])
    with pytest.raises(ConflictError, match="plan again"):
        run_migration(after.dataflow, after.store, plan)
    assert before.cells("build.counts") == {"a": 1, "b": 1}
    assert migrated(after).cells("build.visits") == {"a": 1, "b": 1}


@pytest.mark.parametrize("kind", ["rename", "convert", "drop"])
def test_a_migration_killed_at_any_write_is_done_or_not_done(kind: str) -> None:
    services = {
        "rename": renamed(builder(BUMP)),
        "convert": builder("pass", value="{type: string}"),
        "drop": builder("other().increment(1)", state="other"),
    }
    for at in range(1, 100):
        before = flow_of(builder(BUMP)).send("words", ["a", "b", "a"])
        after = flow_of(services[kind], before)
        (plan,) = plan_migration(after.dataflow, after.store)
        killed = KilledAt(after.store, at)
        try:
            run_migration(after.dataflow, killed, plan)
        except Crash:
            pass
        else:
            assert at > 5
            break
        migrated(after)
        if kind == "drop":
            assert after.send("words", ["b"]).cells("build.other") == {"b": 1}
            after = migrated(flow_of(builder(BUMP), after))
        state = "visits" if kind == "rename" else "counts"
        shown = {key: int(value) for key, value in after.cells(f"build.{state}").items()}
        assert shown == {"a": 2, "b": 1}
        assert verify_job(after.store, JobPaths("build", "test.flow")).verdict.passed
