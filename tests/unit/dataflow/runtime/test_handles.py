"""Rows and cells: what is written, what is refused, and when a handle is of no use."""

from __future__ import annotations

import math
from typing import Any

import pytest

from arroyo_dagster.dataflow.definition.definition import Dataflow, StateDef
from arroyo_dagster.dataflow.definition.reading import parse_document
from arroyo_dagster.dataflow.errors import StateAccessError, StateValueError
from arroyo_dagster.dataflow.runtime.context import Invocation
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


@pytest.mark.parametrize("by", [2**32, -1, 1.5, None, "1", True])
def test_a_cell_refuses_what_its_type_cannot_hold(by: Any) -> None:
    slot, place = cell_slot()
    with place.entered(), pytest.raises(StateValueError) as error:
        slot.access().increment(by)
    assert number(error) == "E41"
    assert slot.fresh == {}


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
