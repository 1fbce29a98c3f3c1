"""The chain of a journal's runs: the newest run by name, and the end of interrupted runs.

Runs begin under the lease of the job, so each follows exactly one other. `head.json` names the
newest. This module stops no gc: `check_journal` reports what does not match.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from arroyo_dagster.errors import FormatError, NotFoundError
from arroyo_dagster.state.codec.journal_chain import (
    PREVIOUS,
    BatchSeal,
    Follows,
    Head,
    decode_end,
    decode_head,
    encode_batch,
    encode_head,
    follows_of,
    is_chained,
    link_after,
    seal_of,
    seals_to_json,
)
from arroyo_dagster.state.codec.records import OWN_VERSION, encode_json, known_fields
from arroyo_dagster.state.model.garbage import digest_of
from arroyo_dagster.state.model.ids import StatePath
from arroyo_dagster.state.model.layout import JobPaths
from arroyo_dagster.state.model.numbers import parse_numbered
from arroyo_dagster.state.storage.concurrency import concurrently
from arroyo_dagster.state.storage.store import ObjectStore

PLAN, END, HEAD = "plan.json", "end.json", "head.json"
UNKNOWN = "unknown"
GONE = "gone"
DIED = "there: the run died before"
RUNS_INSPECTED = 16
"""How many of the newest runs are inspected for a missing end."""


def batch_name(number: int) -> str:
    """Return the name of a batch's object; batches are numbered from 1, without a gap."""
    return f"{number:06}.json"


def read_head(store: ObjectStore, paths: JobPaths) -> Head | None:
    """Read which run is the newest; None if there is none yet.

    Raises:
        FormatError: `head.json` does not decode.
    """
    path = paths.journal / HEAD
    try:
        return decode_head(store.read(path), path)
    except NotFoundError:
        return None


def put_head(store: ObjectStore, paths: JobPaths, head: Head) -> None:
    """Write which run is the newest."""
    store.put(paths.journal / HEAD, encode_head(head))


def run_to_follow(store: ObjectStore, paths: JobPaths) -> Follows | None:
    """Return the run that a new one follows; None if the new one begins a chain.

    An interrupted run gets its end first, so that its last part is known.
    """
    try:
        head = read_head(store, paths)
    except FormatError:
        head = None
    if head is None:
        return _newest_listed(store, paths)
    if head.ended:
        return Follows(run=head.run, digest=head.digest)
    directory = paths.journal / head.run
    finish_run(store, directory)
    return Follows(run=head.run, digest=_last_digest(store, directory) or head.digest)


def _newest_listed(store: ObjectStore, paths: JobPaths) -> Follows | None:
    directories = sorted(store.list_dir(paths.journal).prefixes)[-RUNS_INSPECTED:]
    for directory in reversed(directories):
        digest = _last_digest(store, directory)
        if digest is not None and _place(store, directory)[0]:
            return Follows(run=directory.name, digest=digest, by_listing=True)
    return None


def _last_digest(store: ObjectStore, directory: StatePath) -> str | None:
    for name in (END, PLAN):
        data = _read(store, directory / name)
        if data is not None:
            return digest_of(data)
    return None


def _place(store: ObjectStore, directory: StatePath) -> tuple[bool, Follows | None]:
    """Return whether a run is part of a chain, and the run it follows; a damaged one is not."""
    data = _read(store, directory / PLAN)
    try:
        with known_fields(data or b"{}", directory / PLAN) as fields:
            return is_chained(fields), follows_of(fields)
    except FormatError:
        return False, None


# ---- interrupted runs ----------------------------------------------------------------------------


def finish_open_runs(store: ObjectStore, paths: JobPaths, directories: Iterable[StatePath]) -> int:
    """Complete the entries of interrupted runs from the objects in the store.

    Args:
        directories: of the runs.

    Returns:
        How many objects had no outcome.
    """
    newest = sorted(directories)[-RUNS_INSPECTED:]
    completed = sum(finish_run(store, directory) for directory in newest)
    _advance_head(store, paths, newest)
    return completed


def finish_run(store: ObjectStore, directory: StatePath) -> int:
    """Complete the entries of an interrupted run, and write its end.

    A batch that does not decode stays unchanged; a missing batch stays missing.

    Returns:
        How many objects had no outcome; 0 if the run has ended.
    """
    if store.head(directory / END) is not None:
        return 0
    # Without a plan, these are the remains of an archived or deleted run.
    plan = _read(store, directory / PLAN)
    completed, link = 0, digest_of(plan or b"")
    seals: list[BatchSeal] = []
    for number, data in batches_by_name(store, directory):
        path = directory / batch_name(number)
        at_micros, lines, previous = _decoded(data, path)
        link = link_after(previous or link, lines)
        found, data = _completed(store, path, at_micros, lines, previous, data)
        seals.append(seal_of(number, lines, data))
        completed += found
    if plan is not None:
        sealed = seals_to_json(seals, link) if _place(store, directory)[0] else {}
        store.put(directory / END, encode_json({"version": OWN_VERSION, "died": 1, **sealed}))
    return completed


def _decoded(data: bytes, path: StatePath) -> tuple[int, list[list[Any]], str | None]:
    try:
        return decode_batch(data, path)
    except FormatError:
        return 0, [], None


def _completed(
    store: ObjectStore,
    path: StatePath,
    at_micros: int,
    lines: list[list[Any]],
    previous: str | None,
    data: bytes,
) -> tuple[int, bytes]:
    unknown = [line for line in lines if line[3] == UNKNOWN]
    if not unknown:
        return 0, data
    found = concurrently(lambda line: store.head(StatePath(line[0])), unknown)
    for line, info in zip(unknown, found, strict=True):
        line[3] = GONE if info is None else DIED
    data = encode_batch(at_micros, lines, previous)
    store.put(path, data)
    return len(unknown), data


def _advance_head(store: ObjectStore, paths: JobPaths, newest: list[StatePath]) -> None:
    """Name a run that was interrupted before `head.json` named it; the next run follows it."""
    try:
        head = read_head(store, paths)
    except FormatError:
        return
    known = head
    for directory in newest if head is not None else newest[-1:]:
        if known is not None and (directory.name, True) <= (known.run, known.ended):
            continue
        chained, follows = _place(store, directory)
        before = None if follows is None else follows.run
        name = None if known is None else known.run
        if chained and name in (directory.name, before):
            digest = _last_digest(store, directory) or ""
            known = Head(run=directory.name, digest=digest, ended=True)
    if known is not None and known != head:
        put_head(store, paths, known)


# ---- batches -------------------------------------------------------------------------------------


def decode_batch(data: bytes, path: StatePath) -> tuple[int, list[list[Any]], str | None]:
    """Decode a batch: its time, its lines (path, size, etag, outcome), and the digest it holds, if
    any.

    Raises:
        FormatError: it is not a batch, or a later release wrote it.
    """
    with known_fields(data, path) as fields:
        lines = [list(line) for line in fields.list("objects")]
        for name, _, _, outcome in lines:
            StatePath(name), str(outcome)
        return fields.number("at_micros"), lines, fields.optional_text(PREVIOUS)


def batches_by_name(store: ObjectStore, directory: StatePath) -> Iterator[tuple[int, bytes]]:
    """Yield the batches of a run in order: those that a listing shows, and those it may have
    missed.

    Missing numbers are left out.
    """
    listed = sorted(_numbers(info.path.name for info in store.list_dir(directory).objects))
    after = 0
    for start in (0, *listed):
        number = max(start, after + 1) if start else 1
        while number > after and (data := _read(store, directory / batch_name(number))) is not None:
            yield number, data
            after, number = number, number + 1


def _numbers(names: Iterable[str]) -> Iterator[int]:
    for name in names:
        number = parse_numbered(name, 6)
        if number is not None:
            yield number


def _read(store: ObjectStore, path: StatePath) -> bytes | None:
    try:
        return store.read(path)
    except NotFoundError:
        return None


def seals_of(store: ObjectStore, directory: StatePath) -> tuple[BatchSeal, ...] | None:
    """Return the batches that the end of a run lists; None if the run has no end or no digests."""
    try:
        found = decode_end(store.read(directory / END), directory / END)
    except NotFoundError:
        return None
    return None if found is None else found[1]
