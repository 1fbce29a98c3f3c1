"""Rows and cells: what is written, what is refused, and when a handle is of no use."""

from __future__ import annotations

import math
from typing import Any

import pytest

from arroyo_dagster.dataflow.definition.definition import Dataflow, StateDef
from arroyo_dagster.dataflow.definition.reading import parse_document
from arroyo_dagster.dataflow.errors import StateAccessError, StateValueError
from arroyo_dagster.dataflow.runtime.context import (
    CONTEXT,
    Invocation,
    current,
    key,
    sql,
    state,
    window,
)
from arroyo_dagster.dataflow.runtime.handles import DELETED, CellSlot, RowSlot, slot_for
from arroyo_dagster.dataflow.views.sql import Tables
from tests.dataflows import builder, definition, row_of


def state_of(value: str) -> StateDef:
    document = parse_document(definition(builder("pass", value=value)), extended=True)
    assert isinstance(document, Dataflow)
    (found,) = document.states
    return found


def place_for(slot: Any) -> Invocation:
    place = Invocation({"counts": slot.access}, lambda: Tables([]), {"HOME": "here"})
    slot.place = place
    place.text, place.key, place.serial = "k", "k", 1
    return place


def row_slot(**columns: str) -> tuple[RowSlot, Invocation]:
    slot = slot_for(state_of(row_of(**columns)))
    assert isinstance(slot, RowSlot)
    return slot, place_for(slot)


def cell_slot(kind: str = "u32") -> tuple[CellSlot, Invocation]:
    slot = slot_for(state_of(f"{{type: {kind}}}"))
    assert isinstance(slot, CellSlot)
    return slot, place_for(slot)


def number(error: pytest.ExceptionInfo[Any]) -> object:
    return error.value.facts["number"]


# ---- rows ----------------------------------------------------------------------------------------


def test_a_row_is_a_copy_until_update() -> None:
    slot, place = row_slot(hits="u32", name="string", ok="bool", at="timestamp", f="f32")
    with place.entered():
        row = slot.access()
        assert row.to_dict() == {"at": 0, "f": 0.0, "hits": 0, "name": "", "ok": False}
        assert not row.exists
        row.hits = 3
        assert slot.access().hits == 0
        row.update()
        again = slot.access()
        assert (again.hits, again.exists) == (3, True)
    assert slot.fresh == {"k": (0, 0.0, 3, "", False, 0)}


def test_the_last_update_of_an_invocation_wins() -> None:
    slot, place = row_slot(hits="u32")
    with place.entered():
        for hits in (1, 2):
            row = slot.access()
            row.hits = hits
            row.update()
    assert slot.fresh["k"][0] == 2


def test_a_deleted_row_begins_anew_and_update_brings_it_back() -> None:
    slot, place = row_slot(hits="u32")
    slot.stored["k"] = (7, 0)
    with place.entered():
        row = slot.access()
        row.delete()
        assert slot.fresh["k"] is DELETED
        assert (slot.access().hits, slot.access().exists) == (0, False)
        row.update()
    assert slot.fresh["k"] == (7, 0)


def test_a_failed_function_leaves_what_was_written_before() -> None:
    slot, place = row_slot(hits="u32")
    slot.fresh["k"] = (5, 0)
    with place.entered():
        row = slot.access()
        row.hits = 6
        row.update()
        row.hits = 7
        row.update()
        slot.discard()
        assert slot.fresh == {"k": (5, 0)}
        slot.discard()
    assert slot.fresh == {"k": (5, 0)}


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("u8", 256),
        ("u8", -1),
        ("u32", None),
        ("u32", 1.0),
        ("u32", True),
        ("i8", -129),
        ("f64", math.nan),
        ("f64", math.inf),
        ("f32", 1e39),
        ("f64", 10**400),
        ("string", b"bytes"),
        ("string", "\ud800"),
        ("bool", 1),
        ("timestamp", "now"),
        ("u64", 2**64),
        ("i64", -(2**63) - 1),
    ],
)
def test_what_a_column_cannot_hold_is_refused_by_name(kind: str, value: Any) -> None:
    slot, place = row_slot(other="u8", wrong=kind)
    with place.entered():
        row = slot.access()
        row.wrong = value
        with pytest.raises(StateValueError, match=kind) as error:
            row.update()
    facts = error.value.facts
    assert number(error) == "E41"
    assert (facts["column"], facts["key"], facts["state"]) == ("wrong", "k", "counts")
    assert slot.fresh == {}


def test_f32_is_rounded_and_an_int_becomes_a_float() -> None:
    slot, place = row_slot(a="f32", b="f64")
    with place.entered():
        row = slot.access()
        row.a, row.b = 0.1, 3
        row.update()
    assert slot.fresh["k"][:2] == (0.10000000149011612, 3.0)
    assert isinstance(slot.fresh["k"][1], float)


def test_an_unknown_attribute_or_item_names_the_columns() -> None:
    slot, place = row_slot(pu_zone="u8", hits="u8")
    with place.entered():
        row = slot.access()
        assert row["pu-zone"] == row["pu_zone"] == row.pu_zone == 0
        row["pu-zone"] = 2
        assert row.pu_zone == 2
        for read in (lambda: row.nothing, lambda: row["nothing"]):
            with pytest.raises(StateAccessError, match="nothing") as error:
                read()
            assert number(error) == "E44"
        with pytest.raises(AttributeError, match=r"Row\(hits, pu_zone\).*nothing"):
            row.nothing = 1
    assert not hasattr(row, "another")
    assert "hits=0" in repr(row)


def test_value_is_the_only_column() -> None:
    slot, place = row_slot(count="u32")
    with place.entered():
        row = slot.access()
        row.value += 2
        assert (row.count, row["value"]) == (2, 2)
        row.update()
    assert slot.fresh["k"][0] == 2
    both, place = row_slot(count="u32", other="u32")
    with place.entered(), pytest.raises(StateAccessError, match="count, other"):
        _ = both.access().value


def test_a_row_is_of_no_use_after_its_invocation() -> None:
    slot, place = row_slot(hits="u32")
    with place.entered():
        row = slot.access()
        place.serial += 1
        with pytest.raises(StateAccessError) as error:
            row.update()
        assert number(error) == "E43"
    with pytest.raises(StateAccessError):
        slot.access()


# ---- cells ---------------------------------------------------------------------------------------


def test_a_cell_reads_sets_and_increments() -> None:
    slot, place = cell_slot()
    with place.entered():
        cell = slot.access()
        assert cell.get() == 0
        assert (cell.increment(2), cell.increment(), cell.value) == (2, 3, 3)
        cell.value = 9
        cell.update()
        assert slot.access().get() == 9
        assert repr(cell) == "Cell(9)"
    assert slot.fresh == {"k": 9}


@pytest.mark.parametrize("by", [2**32, -1, 1.5, None, "1", True])
def test_a_cell_refuses_what_its_type_cannot_hold(by: Any) -> None:
    slot, place = cell_slot()
    with place.entered(), pytest.raises(StateValueError) as error:
        slot.access().increment(by)
    assert number(error) == "E41"
    assert slot.fresh == {}


def test_cells_of_other_types() -> None:
    floats, place = cell_slot("f64")
    with place.entered():
        assert floats.access().increment(0.5) == 0.5
        assert floats.access().increment(1) == 1.5
    texts, place = cell_slot("string")
    with place.entered():
        assert texts.access().get() == ""
        texts.access().set("x")
        with pytest.raises(StateAccessError) as error:
            texts.access().increment(1)
    assert number(error) == "E45"
    assert texts.fresh == {"k": "x"}


def test_a_cell_of_an_earlier_record_never_comes_to_life_again() -> None:
    slot, place = cell_slot()
    with place.entered():
        kept = slot.access()
        kept.increment(1)
        place.text, place.serial = "other", 2
        fresh = slot.access()
        fresh.increment(5)
        for use in (kept.get, kept.increment, lambda: kept.set(1), kept.update):
            with pytest.raises(StateAccessError) as error:
                use()
            assert number(error) == "E43"
    assert slot.fresh == {"k": 1, "other": 5}
    with pytest.raises(StateAccessError):
        fresh.get()


def test_two_handles_of_one_invocation_are_one_cell() -> None:
    slot, place = cell_slot()
    with place.entered():
        one, two = slot.access(), slot.access()
        one.increment(1)
        assert two.increment(1) == 2
        slot.discard()
    assert slot.fresh == {}


# ---- the context ---------------------------------------------------------------------------------


def test_context_functions_work_while_an_operator_runs_and_no_longer() -> None:
    slot, place = cell_slot()
    with place.entered():
        assert (key(), window()[0], CONTEXT["env"]["HOME"]) == ("k", -(2**63), "here")
        assert dict(CONTEXT["env"]) == {"HOME": "here"}
        assert state("counts").increment(1) == 1
        assert sql("show tables").shape() == (0, 1)
        with pytest.raises(StateAccessError, match="counts"):
            state("nothing")
    for use in (current, key, window, lambda: sql("select 1"), lambda: CONTEXT["env"]["HOME"]):
        with pytest.raises(StateAccessError) as error:
            use()
        assert number(error) == "E43"
    assert slot.fresh == {"k": 1}


def test_names_of_states_can_be_imported_by_modules() -> None:
    from arroyo_dagster.sdf import counts  # type: ignore[attr-defined]

    _, place = cell_slot()
    with place.entered():
        assert counts().increment(4) == 4
    with pytest.raises(StateAccessError):
        counts()
