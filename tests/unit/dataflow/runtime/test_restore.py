"""Rows of a restored epoch, made entries as their keys come."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from arroyo_dagster.dataflow.definition.definition import Dataflow, StateDef
from arroyo_dagster.dataflow.definition.reading import parse_document
from arroyo_dagster.dataflow.definition.windows import GLOBAL_WINDOW
from arroyo_dagster.dataflow.runtime.restore import UnreadRows
from arroyo_dagster.dataflow.storage.columns import KEY
from arroyo_dagster.dataflow.storage.state_tables import rows_of
from arroyo_dagster.state.tables.key_index import KeyIndex, hashes_of
from tests.dataflows import Clock, Flow, builder, definition, row_of
from tests.shares import fewer_examples

SUM = "row = counts()\nrow.n += 1\nrow.last = record\nrow.update()"


def state_of(value: str) -> StateDef:
    document = parse_document(definition(builder("pass", value=value)))
    assert isinstance(document, Dataflow)
    return document.services["build"].states["counts"]


STATE = state_of(row_of(n="u32", last="string"))
EXPIRING = state_of(row_of(n="u32")[:-1] + ", ttl: 10s}")


def restored_rows(state: StateDef, entries: dict[str, tuple[Any, ...]]) -> UnreadRows:
    (rows,) = rows_of(state, {GLOBAL_WINDOW: entries}, 1)
    keys = [rows.column(KEY)]
    return UnreadRows(state, rows, KeyIndex(keys, hashes_of(keys), np.arange(len(rows))))


def asked(*keys: str) -> pa.Array:
    return pa.array(keys, pa.string())


KEYS = st.lists(st.text(max_size=3), unique=True, min_size=1, max_size=30)


@given(KEYS, st.lists(st.text(max_size=3), max_size=40))
def test_those_asked_for_come_once_and_nobody_else(known: list[str], wanted: list[str]) -> None:
    entries = {key: (f"of {key}", at, 1000 + at) for at, key in enumerate(known)}
    rows = restored_rows(STATE, entries)
    places, found = rows.find(asked(*wanted))
    assert found == {key: entries[key] for key in known if key in wanted}
    rows.drop(places)
    assert rows.find(asked(*wanted, *known))[1] == {
        key: entry for key, entry in entries.items() if key not in wanted
    }


def test_expired_rows_are_counted_once_and_gone() -> None:
    rows = restored_rows(EXPIRING, {"old": (1, 1_000), "new": (2, 6_000)})
    assert rows.expire(10_999) == 0
    assert rows.expire(11_000) == 1
    assert rows.expire(11_000) == 0
    assert rows.find(asked("old", "new"))[1] == {"new": (2, 6_000)}


@fewer_examples(3)
@given(st.lists(st.lists(st.sampled_from("abcde"), max_size=6), min_size=1, max_size=8))
def test_with_and_without_restarts_states_and_what_expired_are_equal(epochs: list[str]) -> None:
    """Rows that are looked at but not written keep their place in the order of expiry."""
    body = "row = counts()\nif record != 'a':\n    row.n += 1\n    row.update()"
    text = definition(builder(body, value=row_of(n="u32")[:-1] + ", ttl: 3s}"), converter="raw")
    shown = []
    for restarts in (False, True):
        flow = Flow(text, clock=Clock())
        seen: list[Any] = []
        for words in epochs:
            flow.clock.ms += 1001
            if restarts:
                flow.restart()
            flow.send("words", words or ["a"])
            seen.append((flow.rows("counts"), flow.metrics("build").get("counts")))
        shown.append(seen)
    assert shown[0] == shown[1]
