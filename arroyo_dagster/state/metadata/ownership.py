"""Marks as objects below the checkpoint URL, and a store that refuses to change what is marked."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from arroyo_dagster.errors import FormatError, NotFoundError
from arroyo_dagster.state.codec import records
from arroyo_dagster.state.model.ids import StatePath
from arroyo_dagster.state.model.layout import (
    OWNERSHIP_DIRECTORY,
    JobPaths,
    mark_path,
    parse_mark_path,
)
from arroyo_dagster.state.planning.ownership import EVERYTHING, Mark, Ownership, check_maintained
from arroyo_dagster.state.storage.concurrency import concurrently
from arroyo_dagster.state.storage.store import DeleteOutcome, ObjectStore
from arroyo_dagster.state.storage.wrappers import MUTATING, Wrapper

T = TypeVar("T")


class Owned(Wrapper):
    """A store that refuses every change of an object below a marked prefix.

    Args:
        marks: settings of this deployment.
    """

    def __init__(self, store: ObjectStore, marks: Sequence[Mark]) -> None:
        super().__init__(store)
        self.marks = tuple(marks)

    def open_input(self, path: StatePath) -> Any:
        """Open the object for random access, as the wrapped store does."""
        return self.inner.open_input(path)

    def delete_many(self, paths: Iterable[StatePath]) -> DeleteOutcome:
        """Delete objects, none of which is marked; see `ObjectStore.delete_many`."""
        doomed = tuple(paths)
        for path in doomed:
            check_maintained(self.marks, path)
        return self.inner.delete_many(doomed)

    def _call(self, verb: str, path: str, action: Callable[[], T], data: bytes = b"") -> T:
        if verb in MUTATING:
            check_maintained(self.marks, path)
        return action()


def check_job_maintained(store: ObjectStore, paths: JobPaths) -> None:
    """Refuse to maintain a job that an object below the URL marks. Costs up to three reads.

    Raises:
        InputError: it is marked.
        FormatError: a mark does not decode; then nobody maintains the job.
    """
    segments = str(paths.root).split("/")
    prefixes = [EVERYTHING, *("/".join(segments[: at + 1]) for at in range(len(segments)))]
    found = (_read_mark(store, prefix) for prefix in prefixes)
    check_maintained([mark for mark in found if mark is not None], paths.root)


def read_ownership(store: ObjectStore) -> list[Mark]:
    """Return the marks below the URL, by prefix.

    Raises:
        FormatError: one does not decode.
    """
    try:
        prefixes = [parse_mark_path(info.path) for info in store.list(OWNERSHIP_DIRECTORY)]
    except NotFoundError:
        return []  # nothing was ever written below the URL
    wanted = sorted(prefix for prefix in prefixes if prefix is not None)
    found = concurrently(lambda prefix: _read_mark(store, prefix), wanted)
    return [mark for mark in found if mark is not None]


def write_mark(store: ObjectStore, mark: Mark) -> None:
    """Mark a prefix for everybody who maintains jobs below this URL."""
    fields = {"version": 1, "ownership": mark.ownership.value, "note": mark.note}
    store.put(mark_path(mark.prefix), records.encode_json(fields))


def delete_mark(store: ObjectStore, prefix: str) -> bool:
    """Delete the mark of exactly this prefix; return whether there was one."""
    path = mark_path(prefix)
    if store.head(path) is None:
        return False
    store.delete_many([path])
    return True


def _read_mark(store: ObjectStore, prefix: str) -> Mark | None:
    path = mark_path(prefix)
    try:
        fields = records.decode_json(store.read(path), path)
    except NotFoundError:
        return None
    known = {one.value: one for one in Ownership}
    ownership = known.get(str(fields.get("ownership")))
    if ownership is None:
        raise FormatError(
            "the mark is neither other nor borrowed, so that nothing is changed below it",
            path=path,
            next_step="find out who wrote it, then mark it again: `arroyo-state ownership set`",
        )
    note = fields.get("note")
    return Mark(
        prefix=prefix,
        ownership=ownership,
        note=note if isinstance(note, str) else "",
        stored=True,
    )
