"""Which rows each epoch must hold: no row is lost, and none comes back that an edit has removed.

Shares no code with what it judges; bytes are parsed as in `oracle`.
"""

from __future__ import annotations

import base64
import functools
import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.explorer.restoring import PARALLELISMS, OperatorState, states_of
from tests.explorer.rows import rows_in
from tests.explorer.world import Object, Process, Violation
from tests.formats import state_pb2 as pb

MANIFEST = "/checkpoint-manifest.pb"
OPERATOR = re.compile(r".*/checkpoint-\d+/operator-.+/metadata")
_FILE = re.compile(r".*/operator-(.+)/table-([a-z]+)-[^/]+")
STEP, RETENTION = 10, 25
"""Of jobs of ours: how far event time moves with an epoch, and how long rows of table `t` stay."""

Row = tuple[str, str, str]
"""Operator, table and row."""

Held = Mapping[Row, int]
"""The rows of an epoch, or of one metadata object, with the time until which their file is kept; of
tables without a time an endless one."""

Change = Callable[[Row], bool]
"""Whether an edit removes a row."""

_ENDLESS = 2**62
CHANGES = ("editing", "forking", "taking")
"""What begins the names of processes that change rows of Arroyo jobs."""


@functools.lru_cache(maxsize=20_000)
def _listed(data: bytes, whole: bool) -> tuple[tuple[str, int], ...]:
    """The files that a metadata object lists, with the largest time in each."""
    operators = (
        pb.CheckpointManifest.FromString(data).operators
        if whole
        else [pb.OperatorCheckpointMetadata.FromString(data)]
    )
    found: list[tuple[str, int]] = []
    for operator in operators:
        for table in operator.table_checkpoint_metadata.values():
            if table.table_type == pb.GLOBAL_KEY_VALUE:
                one = pb.GlobalKeyedTableTaskCheckpointMetadata.FromString(table.data)
                found += [(path, _ENDLESS) for path in one.files]
            else:
                timed = pb.ExpiringKeyedTimeTableCheckpointMetadata.FromString(table.data)
                found += [(file.file, file.max_timestamp_micros) for file in timed.files]
    return tuple(found)


@functools.lru_cache(maxsize=20_000)
def _parent(data: bytes) -> str | None:
    one = pb.CheckpointManifest.FromString(data)
    return one.parent_checkpoint_ref if one.HasField("parent_checkpoint_ref") else None


def _is_forked(source: OperatorState, job: OperatorState) -> bool:
    """Whether an operator loads what that of the source loads, but for the state of a sink."""
    of_sinks = source.commits | job.commits
    loaded = (one.loaded(job.parallelism) for one in (source, job))
    theirs, own = ({at: n for at, n in one.items() if at[0] not in of_sinks} for one in loaded)
    return theirs == own


@dataclass
class Edited:
    """What an edit does: the rows that it removes, and one that it adds.

    Attributes:
        request: of a relative edit, which adds a row that depends on the others.
        source: of a fork, the rows of the other job; of a rollback, of the job itself.
        epoch: of a rollback, the one to which the job goes back.
    """

    removes: Change = lambda row: False
    adds: tuple[Row, ...] = ()
    request: str | None = None
    source: Truth | None = None
    epoch: int | None = None

    def of(self, held: Held) -> set[Row]:
        return {one for one in held if not self.removes(one)} | set(self.adds)


@dataclass
class Truth:
    """The rows of each epoch of a job, as they were when it came to exist.

    Attributes:
        objects: of the job, by paths below its URL.
        edits: what each process edits, by its name.
        bases: the epochs that edits began from.
        gone: rows that an edit of a stopped Arroyo job has removed, until it is undone.
        of_edits: the epochs that only edits have pinned.
        lost: of metadata objects that were lost or cut, by path, what they said.
        cut: what was left of those that were cut.
        built: objects that a rebuild has written.
        states: of a job that others are forked from, or that goes back, by epoch and operator, all
            that it ever was.

    Of each row that was ever there, the time until which its first file was kept is known, and
    whether an edit, an undo or a rollback has taken the row out. Others that have expired may lie
    in a merged file again, since no restore loads them.
    """

    objects: Any
    ours: bool
    held: dict[int, Held] = field(default_factory=dict)
    edits: dict[str, Edited] = field(default_factory=dict)
    bases: set[int] = field(default_factory=set)
    gone: set[Row] = field(default_factory=set)
    of_edits: set[int] = field(default_factory=set)
    lost: dict[str, list[OperatorState]] = field(default_factory=dict)
    cut: dict[str, bytes] = field(default_factory=dict)
    built: set[str] = field(default_factory=set)
    states: dict[tuple[int, str], set[OperatorState]] | None = None
    forked: dict[str, set[int]] = field(default_factory=dict)
    _seen: dict[Row, int] = field(default_factory=dict)
    _taken: set[Row] = field(default_factory=set)
    _authors: dict[str, str] = field(default_factory=dict)
    _requests: dict[int, str] = field(default_factory=dict)
    _versions: dict[str, list[bytes]] = field(default_factory=dict)

    def rows_of(self, data: bytes, *, whole: bool) -> Held | None:
        """The rows of the files that a metadata object lists; None if one is missing."""
        found: dict[Row, int] = {}
        for path, time in _listed(data, whole):
            name = _FILE.fullmatch(path)
            if name is None or path not in self.objects:
                return None
            for one in rows_in(self.objects[path][0]):
                key = (name[1], name[2], one)
                found[key] = max(time, found.get(key, 0))
        return found

    def _of_epoch(self, needs: frozenset[str]) -> Held | None:
        found: dict[Row, int] = {}
        for path in needs:
            whole = path.endswith(MANIFEST)
            if not whole and not OPERATOR.fullmatch(path):
                continue
            held = self.rows_of(self.objects[path][0], whole=whole)
            if held is None:
                return None
            found.update(held)
        return found

    # ---- epochs ----------------------------------------------------------------------------------

    def look(self, root: str, epochs: Mapping[int, frozenset[str]]) -> None:
        """Note the epochs that are there when a schedule begins, and what an undo restores."""
        for epoch, needs in epochs.items():
            held = self._of_epoch(needs)
            if held is not None:
                self._hold(epoch, held)
        for path, (data, _, _) in self.objects.items():
            changed = path.startswith(f"{root}/_arroyo_dagster/changes/")
            if changed and not path.endswith("-rebuild.json"):
                for name, text in json.loads(data)["before"].items():
                    self._versions.setdefault(name, []).append(base64.b64decode(text))

    def appeared(self, process: Process, epoch: int, needs: frozenset[str]) -> None:
        """A process has made an epoch exist, or has written what makes it exist again."""
        held = self._of_epoch(needs)
        if held is None:
            return
        if not self.ours:
            back = self.gone.intersection(held)
            if back and process.role == "arroyo":
                raise Violation(f"{process.name}: epoch {epoch} has {min(back)} again")
            return
        known = self.held.get(epoch)
        if known is not None:
            if set(known) != set(held):
                raise Violation(f"{process.name} wrote epoch {epoch} over, with other rows")
            return
        ref = next((one for one in needs if one.endswith(MANIFEST)), None)
        author = process.name if ref is None else self._authors.get(ref)
        # Begun before the schedule, or brought back: then it is as it was.
        if author is not None and not process.name.startswith("undelete"):
            self._check(author, epoch, ref, held)
        self._hold(epoch, held)

    def _hold(self, epoch: int, held: Held) -> None:
        self.held[epoch] = held
        for one, time in held.items():
            self._seen[one] = min(time, self._seen.get(one, time))

    def wrote(self, process: Process, path: str) -> None:
        """A process has written a manifest, which another one may claim once it has died."""
        self._authors.setdefault(path, process.name)

    def _check(self, author: str, epoch: int, ref: str | None, held: Held) -> None:
        newest = max(self.held, default=0)
        parent = newest if ref is None else self._parent_of(ref)
        before, now = self.held.get(parent), set(held)
        kind = author.partition(" ")[0]
        if kind in ("rollback", "undoing"):
            allowed = self.bases if kind == "undoing" else set(self.held)
            choices = sorted(allowed) if ref is None else [parent]
            if not any(now == set(self.held[one]) for one in choices if one in self.held):
                raise Violation(f"{author}: epoch {epoch} has no rows of {choices}")
            self._taken |= set(self.held.get(newest, ())) - now
            self._taken -= now
        elif before is None:
            return
        elif kind == "editing":
            if parent != newest:
                raise Violation(f"{author}: epoch {epoch} leaves epoch {newest} out")
            self.bases.add(parent)
            edited = self.edits[author]
            if edited.request is not None:
                if edited.request == self._requests.get(parent):
                    raise Violation(f"{author}: epoch {epoch} repeats a relative edit")
                self._requests[epoch] = edited.request
                edited = Edited(adds=tuple(now - set(before))[:1])
            self._same(author, epoch, now, edited.of(before))
            self._taken |= set(before) - now
        else:
            cutoff = epoch * STEP - RETENTION
            lost = {one for one, time in before.items() if time >= cutoff} - now
            if lost:
                raise Violation(f"{author}: epoch {epoch} has lost {min(lost)}")
            back = {
                one
                for one in now - set(before)
                if one in self._taken or (one in self._seen and self._seen[one] >= cutoff)
            }
            if back:
                raise Violation(f"{author}: epoch {epoch} has {min(back)} again")

    def _parent_of(self, ref: str) -> int:
        parent = _parent(self.objects[ref][0])
        found = re.search(r"/checkpoint-(\d+)/", parent or "")
        return int(found[1]) if found else 0

    @staticmethod
    def _same(author: str, epoch: int, now: set[Row], expected: set[Row]) -> None:
        if now != expected:
            lost, more = sorted(expected - now)[:2], sorted(now - expected)[:2]
            raise Violation(f"{author}: epoch {epoch} lacks {lost}, and has {more} besides")

    # ---- metadata of Arroyo jobs, overwritten ----------------------------------------------------

    def overwritten(self, process: Process, path: str, before: Object) -> None:
        """A rewrite, an edit or an undo has overwritten a metadata object of an Arroyo job."""
        now, whole = self.objects[path][0], path.endswith(MANIFEST)
        versions = self._versions.setdefault(path, [])
        versions.append(before[0])
        kind = process.name.partition(" ")[0]
        if now in versions:  # put back
            self.gone.clear()
            return
        old, new = (self.rows_of(data, whole=whole) for data in (before[0], now))
        if old is None or new is None:
            return
        if kind == "putting":
            raise Violation(f"{process.name} wrote {path}, which was never like that")
        change = self.edits[process.name] if kind in CHANGES else Edited()
        if kind == "editing" and self._without(process, old) == set(old):
            raise Violation(f"{process.name} wrote {path}, of which it removes nothing")
        if change.source is not None:
            self._check_forked(process, path, change.source, change.epoch)
            self.gone -= set(new) if change.epoch is not None else set()
            return
        if set(new) != change.of(old):
            raise Violation(f"{process.name} wrote {path} with other rows than it should")
        self._check_loaded(process, path, before[0], change)

    def _check_loaded(self, process: Process, path: str, before: bytes, change: Edited) -> None:
        """Each subtask loads what it loaded, at whatever parallelism, but what an edit removes."""
        whole = path.endswith(MANIFEST)
        was = states_of(self.objects, before, whole=whole)
        now = states_of(self.objects, self.objects[path][0], whole=whole)
        assert was is not None
        assert now is not None
        for old, new in zip(was, now, strict=True):
            for parallelism in PARALLELISMS:
                expected = {
                    at: times
                    for at, times in old.loaded(parallelism).items()
                    if not change.removes((old.operator, at[0], at[2]))
                }
                if new.loaded(parallelism) != expected:
                    raise Violation(
                        f"{process.name}: {parallelism} subtasks load other rows of {path}"
                    )

    # ---- lost metadata ---------------------------------------------------------------------------

    def lose(self, path: str, left: bytes | None = None) -> None:
        """A metadata object will be lost, or this much of it will be left."""
        if left is not None:
            self.cut[path] = left
        whole = path.endswith(MANIFEST)
        found = whole or OPERATOR.fullmatch(path)
        data = self.objects[path][0]
        self.lost[path] = (states_of(self.objects, data, whole=whole) or []) if found else []

    @property
    def is_lost(self) -> bool:
        """Whether metadata that was lost or cut is not there again."""
        return any(
            path not in self.objects or self.objects[path][0] == self.cut.get(path)
            for path in self.lost
        )

    def rebuilt(self, process: Process, path: str, began: int) -> None:
        """Lost metadata was written anew: each subtask loads all that it loaded, and besides only
        what had expired, or what an attempt has left that had failed.
        """
        if path not in self.lost:
            return
        whole = path.endswith(MANIFEST)
        was = {one.operator: one for one in self.lost[path]}
        for new in states_of(self.objects, self.objects[path][0], whole=whole) or ():
            old = was[new.operator]
            for parallelism in PARALLELISMS:
                before, now = (one.loaded(parallelism) for one in (old, new))
                if any(now[at] != times for at, times in before.items()):
                    raise Violation(
                        f"{process.name} wrote {path}, and {parallelism} subtasks load less"
                    )
                more = [at for at in now if at not in before and not old.has_expired(at[2])]
                if more and not self._of_attempts(path, {at[2] for at in more}, began):
                    raise Violation(f"{process.name} wrote {path}, which has {min(more)} besides")

    def _of_attempts(self, path: str, rows: set[str], began: int) -> bool:
        """Whether rows are in files that are older than the epoch."""
        old = (
            one
            for name, _ in _listed(self.objects[path][0], path.endswith(MANIFEST))
            if self.objects[name][1] < began
            for one in rows_in(self.objects[name][0])
        )
        return rows <= {*old}

    # ---- forks -----------------------------------------------------------------------------------

    def remember_all(self, paths: Iterable[str]) -> None:
        """Note what the metadata objects among these paths say, and all that follow."""
        self.states = {}
        for path in paths:
            if OPERATOR.fullmatch(path) or path.endswith(MANIFEST):
                self.remember(path)

    def remember(self, path: str) -> None:
        """Note what a metadata object of a job that is forked from says, now that it is written."""
        if self.states is None:
            return
        whole = path.endswith(MANIFEST)
        for one in states_of(self.objects, self.objects[path][0], whole=whole) or ():
            self.states.setdefault((one.epoch, one.operator), set()).add(one)

    def _check_forked(self, process: Process, path: str, source: Truth, epoch: int | None) -> None:
        """The job loads what the source would load, were it started with as many subtasks."""
        whole = path.endswith(MANIFEST)
        now = states_of(self.objects, self.objects[path][0], whole=whole)
        assert now is not None
        assert source.states is not None
        epochs = {number for number, _ in source.states} if epoch is None else {epoch}
        taken = source.forked.setdefault(process.name, epochs)
        for new in now:
            taken &= {
                number
                for (number, operator), states in source.states.items()
                if operator == new.operator and any(_is_forked(one, new) for one in states)
            }
        if not taken:
            raise Violation(f"{process.name} wrote {path}, of which no epoch of the source is like")

    def _without(self, process: Process, held: Held) -> set[Row]:
        return self.edits[process.name].of(held)

    def was_edited(self, process: Process) -> None:
        """An edit of an Arroyo job says that it is done: the rows stay away until it is undone."""
        change = self.edits[process.name]
        self.gone |= {one for one in self._of_versions() if change.removes(one)}

    def _of_versions(self) -> set[Row]:
        found: set[Row] = set()
        for path, versions in self._versions.items():
            held = self.rows_of(versions[-1], whole=path.endswith(MANIFEST))
            found.update(held or ())
        return found
