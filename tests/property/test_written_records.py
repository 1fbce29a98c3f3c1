"""What a writer of this package accepts its reader accepts: each record that is stored reads back
as it was, or is refused when it is written, also with hostile names and extreme numbers."""

from __future__ import annotations

import dataclasses
import enum
import typing
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import is_dataclass
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arroyo_dagster.errors import FormatError, InputError
from arroyo_dagster.orchestration.sensor import decode_cursor, encode_cursor
from arroyo_dagster.state import (
    Epoch,
    JobId,
    JobPaths,
    MemoryStore,
    PipelineId,
    StatePath,
    WorkerGeneration,
)
from arroyo_dagster.state.codec import gc, journal
from arroyo_dagster.state.codec.derived import decode, encode, encode_json
from arroyo_dagster.state.codec.journal import Previous, RunHeader
from arroyo_dagster.state.codec.records import CopyMarker, StopRequest
from arroyo_dagster.state.metadata.lease_records import (
    NewestLease,
    encode_lease,
    lease_here,
    read_record,
)
from arroyo_dagster.state.model.changes import ChangeRecord
from arroyo_dagster.state.model.checkpoints import (
    CommitNote,
    CommittedMarker,
    CurrentGeneration,
    EpochRecord,
    GenerationManifest,
)
from arroyo_dagster.state.model.compaction import CompactionRecord
from arroyo_dagster.state.model.garbage import GcPlan, JobPins, Moved, Quarantined
from arroyo_dagster.state.model.ids import path_error
from arroyo_dagster.state.model.json_fields import MAX_U64
from arroyo_dagster.state.model.maintenance_window import WindowRecord
from arroyo_dagster.state.model.objects import Packed
from arroyo_dagster.state.operations.catalog.changes import FleetCursor
from arroyo_dagster.state.operations.catalog.job_changes import JobPosition

HOSTILE = (
    *("a...b", "...", "..", ".", "", " ", "a b", "a|b", "a\nb", "\x00", "\x7f", "%", "%2F", "a%"),
    *("%2e%2e", "\\", "ä€𝄞", "\u202e", "e\u0301", '"', "'", "{}", "a=b", "a@7", "a,b", "null"),
    *("x" * 3000, "\ud800", "\u2028", "a/b", "a//b", "/", "CON", "a.json", "0000000007.json"),
)
TEXTS = st.sampled_from(HOSTILE) | st.text(max_size=12)
PATHS = (
    st.lists(TEXTS, min_size=1, max_size=3)
    .map("/".join)
    .filter(lambda text: path_error(text) is None and "\ud800" not in text)
    .map(StatePath)
)
NUMBERS = st.sampled_from(
    [0, 1, -1, *(2**bits + more for bits in (31, 32, 53, 63, 64) for more in (-1, 0)), 10**30]
)


SIZES = st.none() | st.integers(0, 2**62)


def values_of(hint: Any) -> st.SearchStrategy[Any]:
    """Values of an annotation; texts and numbers are hostile ones."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is StatePath:
        return PATHS
    if hint is bool or hint is bytes:
        return st.booleans() if hint is bool else st.binary(max_size=4)
    if hint is Packed:
        return st.lists(PATHS, max_size=3, unique=True).map(Packed.of_paths)
    if hasattr(hint, "__supertype__"):
        return values_of(hint.__supertype__)
    if origin is typing.Annotated:
        return values_of(arguments[0])
    if isinstance(hint, type) and issubclass(hint, str):
        return TEXTS
    if isinstance(hint, type) and issubclass(hint, int):
        return NUMBERS
    if hint is type(None):
        return st.none()
    if is_dataclass(hint):
        return records_of(hint)
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return st.sampled_from(hint)
    if hint is object:
        return st.none() | TEXTS | st.lists(TEXTS, max_size=2)
    if origin is tuple and arguments[-1] is not Ellipsis:
        return st.tuples(*map(values_of, arguments))
    if origin is tuple:
        return st.lists(values_of(arguments[0]), max_size=2).map(tuple)
    if origin is not None and isinstance(origin, type) and issubclass(origin, Mapping):
        return st.dictionaries(values_of(arguments[0]), values_of(arguments[1]), max_size=2)
    assert arguments, hint
    return st.one_of(*map(values_of, arguments))


def records_of(kind: Any) -> st.SearchStrategy[Any]:
    hints = typing.get_type_hints(kind)
    fields = [
        one.name for one in dataclasses.fields(kind) if one.name not in ("version", "unknown")
    ]
    return st.builds(partial(build, kind), **{name: values_of(hints[name]) for name in fields})


def build(kind: Any, /, **fields: Any) -> Any:
    """A record; None if the record itself refuses a value."""
    if kind is ChangeRecord:  # all are of the same objects
        fields["before"] = {path: fields["before"].get(path) for path in fields["written"]}
        fields["objects"] = dict.fromkeys(fields["written"], (None, "0"))
    try:
        return kind(**fields)
    except InputError:
        return None


RECORDS = (
    *(CurrentGeneration, GenerationManifest, EpochRecord, CommittedMarker, CommitNote),
    *(JobPins, CompactionRecord, ChangeRecord, WindowRecord),
    *(StopRequest, CopyMarker, NewestLease),
)


def check(record: Any, encode: Callable[[Any], bytes], decode: Callable[[bytes], Any]) -> None:
    try:
        data = encode(record)
    except InputError:
        return
    assert decode(data) == record


@pytest.mark.parametrize("kind", RECORDS)
@given(data=st.data())
def test_a_record_reads_back_or_is_refused(kind: Any, data: st.DataObject) -> None:
    record = data.draw(records_of(kind))
    if record is not None:
        check(record, encode, lambda written: decode(kind, written, "p"))


@given(records_of(GcPlan))
def test_a_plan_reads_back_or_is_refused(plan: Any) -> None:
    def encoded(plan: GcPlan) -> bytes:
        return encode_json(gc.gc_plan_to_json(plan))

    with suppress(FormatError):  # a plan is printed as it is, and refused when it is read
        check(plan, encoded, lambda data: gc.decode_gc_plan(data, "p"))


@given(st.lists(records_of(Moved), max_size=2))
def test_the_index_of_a_quarantine_reads_back_or_is_refused(moved: list[Any]) -> None:
    check(moved, gc.encode_moved, lambda data: gc.decode_moved(data, "p"))


@given(
    records_of(Previous), st.lists(st.tuples(PATHS, SIZES, st.none() | TEXTS, TEXTS), max_size=2)
)
def test_the_parts_of_a_journal_read_back(previous: Previous, lines: list[Any]) -> None:
    """Texts are of a plan, a quarantine or an owner; numbers are counted here."""
    header = RunHeader(
        kind=previous.run,
        plan=previous.digest,
        owner=previous.run,
        begun_at_micros=MAX_U64,
        objects=len(lines),
        size_bytes=2**62,
        quarantine=previous.run,
        more={previous.run: [previous.digest]},
        previous=previous,
    )
    try:
        parts = journal.encode_header(header) + journal.encode_batch(7, lines)
    except InputError:
        return
    first, second = journal.decode_records(parts, "p")
    assert journal.decode_header(first, "p") == header
    assert journal.decode_batch(second, "p") == [(7, *line) for line in lines]


@given(records_of(Quarantined), TEXTS)
def test_a_quarantine_reads_back_or_is_refused(quarantined: Quarantined, owner: str) -> None:
    def decode(data: bytes) -> Quarantined:
        return gc.decode_quarantined(data, "p", quarantined.name)

    check(quarantined, lambda one: gc.encode_quarantined(one, owner), decode)


@given(TEXTS, TEXTS, NUMBERS, NUMBERS)
def test_a_lease_reads_back_or_is_refused(
    owner: str, nonce: str, duration: int, expires: int
) -> None:
    store, path = MemoryStore(), StatePath("leases/0000000007.json")
    try:
        lease = lease_here(
            path,
            7,
            description=owner,
            nonce=nonce,
            duration_micros=duration,
            acquired_at_micros=expires,
        )
        data = encode_lease(lease, expires)
    except InputError:
        return
    store.put(path, data)
    record = read_record(store, path)
    assert record is not None
    kept = expires and max(1, expires)  # a clock may be before 1970, and 0 is a release
    assert (record.description, record.nonce, record.expires_at_micros) == (owner, nonce, kept)


JOBS = st.builds(JobPaths, TEXTS.map(JobId), st.none() | TEXTS.map(PipelineId))


def _is_job(paths: JobPaths) -> bool:
    parts = [paths.job] if paths.pipeline is None else [paths.pipeline, paths.job]
    return all(
        path_error(part) is None and "/" not in part and "\ud800" not in part for part in parts
    )


@given(
    st.dictionaries(JOBS.filter(_is_job), NUMBERS.filter(lambda number: 0 <= number < 2**64)),
    st.none() | TEXTS,
)
def test_the_cursor_of_the_sensor_reads_back(
    epochs: Mapping[JobPaths, int], text: str | None
) -> None:
    positions = {
        paths: JobPosition(
            None if paths.pipeline is None else WorkerGeneration(number), Epoch(number)
        )
        for paths, number in epochs.items()
    }
    cursor = FleetCursor(
        positions=positions, unread=frozenset(positions), start_from=text, listed_to=text
    )
    assert decode_cursor(encode_cursor(cursor, 5, 30)) == cursor
