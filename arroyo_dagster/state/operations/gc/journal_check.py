"""Check whether a journal is as it was written: every part against the digest that another part
holds.

It detects parts and runs that were changed, deleted or inserted, and runs of two maintainers that
followed the same one. It does not detect a rewrite of everything from some part up to the head; to
prove that too, keep the digest of the head elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from arroyo_dagster.errors import FormatError, NotFoundError
from arroyo_dagster.state.codec.journal_chain import (
    BatchSeal,
    Follows,
    Head,
    decode_end,
    encode_batch,
    follows_of,
    is_chained,
    link_after,
)
from arroyo_dagster.state.codec.records import known_fields
from arroyo_dagster.state.model.garbage import digest_of
from arroyo_dagster.state.model.ids import StatePath
from arroyo_dagster.state.model.layout import JobPaths
from arroyo_dagster.state.operations.gc.journal import ARCHIVE, archives_of
from arroyo_dagster.state.operations.gc.journal_chain import (
    DIED,
    END,
    GONE,
    HEAD,
    PLAN,
    UNKNOWN,
    batch_name,
    batches_by_name,
    decode_batch,
    read_head,
)
from arroyo_dagster.state.storage.concurrency import ahead
from arroyo_dagster.state.storage.store import Listing, ObjectStore

if TYPE_CHECKING:
    from arroyo_dagster.state.codec.journal import ArchivedRun

TRIES = 3
"""How often a journal is read that changes while it is read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalFinding:
    """A part that does not match."""

    path: StatePath
    problem: str


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalCheck:
    """The result of a check.

    Attributes:
        runs, parts: how many were read, including those without digests.
        findings: the parts that do not match, in the order of the runs.
        unchained: how many runs without digests were written before the chain began.
        unchained_before: the first run that has digests; None if none has.
        open_runs: active or interrupted runs; the next gc writes the end of the latter.
        head: the newest run and its digest; None if no run has digests.
    """

    runs: int
    parts: int
    findings: tuple[JournalFinding, ...]
    unchained: int
    unchained_before: str | None
    open_runs: tuple[str, ...]
    head: Head | None

    @property
    def whole(self) -> bool:
        return not self.findings


@dataclass(slots=True)
class _Run:
    """The facts about a run that the checks of other runs need."""

    name: str
    path: StatePath
    chained: bool = False
    follows: Follows | None = None
    plan_digest: str | None = None
    end_digest: str | None = None
    batches: int = 0
    problems: list[JournalFinding] = field(default_factory=list)

    def report(self, path: StatePath, problem: str) -> None:
        self.problems.append(JournalFinding(path=path, problem=problem))

    @property
    def parts(self) -> int:
        return self.batches + (self.plan_digest is not None) + (self.end_digest is not None)


def check_journal(store: ObjectStore, paths: JobPaths) -> JournalCheck:
    """Read every part of a journal and compare it with the digests. Writes nothing.

    Reads one run, or one archive, at a time.

    Raises:
        StorageError: the store failed.
    """
    for attempt in range(1, TRIES + 1):
        before = _state(store, paths)
        found = _checked(store, paths, *before)
        if found.whole or attempt == TRIES or _state(store, paths) == before:
            break
    return found


def _state(store: ObjectStore, paths: JobPaths) -> tuple[Head | JournalFinding | None, Listing]:
    head: Head | JournalFinding | None
    try:
        head = read_head(store, paths)
    except FormatError as error:
        head = JournalFinding(path=paths.journal / HEAD, problem=error.message)
    return head, store.list_dir(paths.journal)


def _checked(
    store: ObjectStore, paths: JobPaths, head: Head | JournalFinding | None, listed: Listing
) -> JournalCheck:
    problems: list[JournalFinding] = [head] if isinstance(head, JournalFinding) else []
    head = head if isinstance(head, Head) else None
    runs: dict[str, _Run] = {}
    for run in _read(store, paths, listed, problems):
        runs.setdefault(run.name, run)
    ordered = [runs[name] for name in sorted(runs)]
    chained = [run for run in ordered if run.chained]
    open_runs = tuple(run.name for run in ordered if run.end_digest is None)
    if chained or head is not None:
        problems += _links(paths, runs, chained, head)
    problems += [one for run in ordered for one in run.problems]
    first = chained[0].name if chained else None
    unchained = [run for run in ordered if not run.chained]
    problems += [
        JournalFinding(
            path=run.path,
            problem=f"this run has no digests, and the chain began before it with {first}: it was "
            "inserted, its plan.json was damaged, or an older release wrote it",
        )
        for run in unchained
        if first is not None and run.name > first and not run.problems
    ]
    return JournalCheck(
        runs=len(ordered),
        parts=sum(run.parts for run in ordered),
        findings=tuple(sorted(_first_of_each(problems), key=_order)),
        unchained=sum(1 for run in unchained if first is None or run.name < first),
        unchained_before=first,
        open_runs=open_runs,
        head=head,
    )


def _first_of_each(findings: Iterable[JournalFinding]) -> Iterable[JournalFinding]:
    found: dict[StatePath, JournalFinding] = {}
    for one in findings:
        found.setdefault(one.path, one)
    return found.values()


def _order(finding: JournalFinding) -> tuple[bool, str]:
    """Sort key: by run, in the order in which its parts were written."""
    return finding.path.name == HEAD, finding.path.removesuffix(PLAN)


def _read(
    store: ObjectStore, paths: JobPaths, listed: Listing, problems: list[JournalFinding]
) -> Iterator[_Run]:
    archives = archives_of(info.path for info in listed.objects)
    archived: set[str] = set()
    for path in archives:
        try:
            from arroyo_dagster.state.codec.journal import archived_runs

            for one in archived_runs(store.read(path), path):
                archived.add(one.name)
                yield _archived(one, path)
        except (FormatError, NotFoundError) as error:
            problems.append(JournalFinding(path=path, problem=error.message))
    for info in listed.objects:
        if info.path.name != HEAD and not info.path.name.endswith(ARCHIVE):
            problem = "unexpected name: no part of a journal is named like this"
            problems.append(JournalFinding(path=info.path, problem=problem))
    own = [path for path in listed.prefixes if path.name not in archived]
    yield from ahead(lambda path: _directory(store, path), own)


# ---- within a run --------------------------------------------------------------------------------


def _directory(store: ObjectStore, directory: StatePath) -> _Run:
    run = _Run(directory.name, directory)
    names = {info.path.name for info in store.list_dir(directory).objects}
    _read_plan(run, _optional(store, directory / PLAN), directory / PLAN)
    end = _optional(store, directory / END)
    sealed = _read_end(run, end, directory / END)
    if sealed is not None:
        chain = _Chain(run, directory)
        for seal in sealed[1]:
            _compare(chain, seal, _optional(store, directory / batch_name(seal.number)))
        chain.step(directory / END, None, sealed[0])
        known = {PLAN, END, *(batch_name(seal.number) for seal in sealed[1])}
        for name in sorted(names - known):
            run.report(directory / name, "end.json does not list this part: it was inserted")
    elif run.chained and end is None:
        _open_run(run, store, directory)
    else:
        run.batches = sum(1 for name in names if name not in (PLAN, END))
    return run


def _optional(store: ObjectStore, path: StatePath) -> bytes | None:
    try:
        return store.read(path)
    except NotFoundError:
        return None


def _read_plan(run: _Run, data: bytes | None, path: StatePath) -> None:
    if data is None:
        run.report(path, "this part is missing")
        return
    run.plan_digest = digest_of(data)
    try:
        with known_fields(data, path) as fields:
            run.chained, run.follows = is_chained(fields), follows_of(fields)
    except FormatError as error:
        run.report(path, error.message)


def _read_end(
    run: _Run, data: bytes | None, path: StatePath
) -> tuple[str, tuple[BatchSeal, ...]] | None:
    if data is None:
        return None
    run.end_digest = digest_of(data)
    try:
        found = decode_end(data, path)
    except FormatError as error:
        run.report(path, error.message)
        return None
    if run.chained and found is None:
        run.report(path, "this end lists no parts, but plan.json requires it")
    return found


@dataclass(slots=True)
class _Chain:
    """The parts of a run in order: each holds the digest of the one before.

    Attributes:
        link: the digest that the next part must hold; None if unknown.
        number: of the batch before.
    """

    run: _Run
    directory: StatePath
    link: str | None = None
    number: int = 0
    before: StatePath | None = None

    def __post_init__(self) -> None:
        self.link, self.before = self.run.plan_digest, self.directory / PLAN

    def step(self, path: StatePath, number: int | None, previous: str | None) -> None:
        """Compare the digest that a part holds with the part before it."""
        # An interrupted run may lack requests that were in flight: nothing to compare with.
        known = self.link is not None and number in (None, self.number + 1)
        if known and previous != self.link:
            assert self.before is not None
            self.run.report(self.before, f"this was changed: {path.name} holds another digest")
        self.before, self.number = path, number or self.number


def _compare(chain: _Chain, seal: BatchSeal, data: bytes | None) -> None:
    """Compare a batch with its entry in `end.json`, and with the part before it."""
    path, run = chain.directory / batch_name(seal.number), chain.run
    problem, lines, previous = None, None, None
    if data is None:
        problem = "this part is missing: end.json lists it"
    elif digest_of(data) != seal.digest:
        problem = "this part does not match end.json: it was changed"
    else:
        problem, lines, previous = _lines(data, path)
    run.batches += data is not None
    if problem is not None:
        run.report(path, problem)
        chain.link, chain.before, chain.number = None, path, seal.number
        return
    chain.step(path, seal.number, previous)
    chain.link = link_after(previous or "", lines or ())


def _lines(data: bytes, path: StatePath) -> tuple[str | None, list[list[Any]] | None, str | None]:
    try:
        _, lines, previous = decode_batch(data, path)
    except FormatError as error:
        return error.message, None, None
    return None, lines, previous


def _open_run(run: _Run, store: ObjectStore, directory: StatePath) -> None:
    """Check a run without an end: requests that were in flight at its interruption may be missing,
    but none of their objects was deleted.
    """
    chain, gap = _Chain(run, directory), None
    for number, data in batches_by_name(store, directory):
        path = directory / batch_name(number)
        run.batches += 1
        problem, lines, previous = _lines(data, path)
        if problem is not None or lines is None:
            run.report(path, str(problem))
            return
        if number != chain.number + 1 and gap is None:
            gap = directory / batch_name(chain.number + 1)
        if gap is not None and any(line[3] not in (UNKNOWN, GONE, DIED) for line in lines):
            run.report(gap, "this part is missing: later ones were completed")
            return
        chain.step(path, number, previous)
        chain.link = link_after(previous or "", lines)


def check_archived(one: ArchivedRun, archive: StatePath) -> list[JournalFinding]:
    """Return the mismatches of an archived run: its original parts against their digests."""
    return _archived(one, archive).problems


def _archived(one: ArchivedRun, archive: StatePath) -> _Run:
    path = StatePath(archive / one.name)
    run = _Run(one.name, path)
    _read_plan(run, one.plan.encode(), path / PLAN)
    sealed = _read_end(run, one.end.encode(), path / END)
    if sealed is None:
        run.batches = len({line[0] for line in one.lines})
        return run
    at, link = 0, run.plan_digest or ""
    for seal in sealed[1]:
        lines = [list(line[1:]) for line in one.lines[at : at + seal.objects]]
        data = encode_batch(one.lines[at][0], lines, link) if lines else b""
        at, link = at + seal.objects, link_after(link, lines)
        run.batches += 1
        if digest_of(data) != seal.digest:
            run.report(path / batch_name(seal.number), "this part does not match end.json")
            return run
    if at != len(one.lines):
        run.report(path / END, "the run holds more objects than this lists")
    elif link != sealed[0]:
        run.report(path / PLAN, f"this was changed: {END} holds another digest")
    return run


# ---- from run to run -----------------------------------------------------------------------------


def _links(
    paths: JobPaths, runs: dict[str, _Run], chained: list[_Run], head: Head | None
) -> Iterator[JournalFinding]:
    if head is not None or not all(_has_done_nothing(run, None) for run in chained):
        yield from _check_head(paths, runs, head)
    for run in chained:
        yield from _check_link(paths, runs, run)
    on_chain = _on_chain(chained, head)
    for run in chained:
        if run.name in on_chain or _has_done_nothing(run, head):
            continue
        yield JournalFinding(
            path=run.path,
            problem=f"a fork: this run is not in the chain that {HEAD} ends. Two maintainers ran "
            "at once (one had lost its lease), or the run was inserted",
        )


def _check_head(
    paths: JobPaths, runs: dict[str, _Run], head: Head | None
) -> Iterator[JournalFinding]:
    path = paths.journal / HEAD
    if head is None:
        yield JournalFinding(path=path, problem="this part is missing or damaged")
        return
    newest = runs.get(head.run)
    if newest is None:
        problem = f"the newest run is missing: {HEAD} names it"
        yield JournalFinding(path=StatePath(paths.journal / head.run), problem=problem)
    elif head.ended and newest.end_digest != head.digest:
        problem = f"this part is missing or was changed: {HEAD} holds another digest"
        yield JournalFinding(path=newest.path / END, problem=problem)
    elif not head.ended and newest.plan_digest != head.digest:
        problem = f"this part is missing or was changed: {HEAD} holds another digest"
        yield JournalFinding(path=newest.path / PLAN, problem=problem)


def _check_link(paths: JobPaths, runs: dict[str, _Run], run: _Run) -> Iterator[JournalFinding]:
    follows = run.follows
    if follows is None:
        return
    if follows.by_listing:
        problem = f"{HEAD} was missing or damaged when this run began: runs may have been removed"
        yield JournalFinding(path=run.path / PLAN, problem=problem)
    before = runs.get(follows.run)
    if before is None:
        problem = f"this run is missing: {run.name} follows it"
        yield JournalFinding(path=StatePath(paths.journal / follows.run), problem=problem)
    elif follows.digest not in (before.end_digest, before.plan_digest):
        problem = f"this part is missing or was changed: {run.name} holds another digest"
        yield JournalFinding(path=before.path / END, problem=problem)
    elif follows.digest != before.end_digest and before.end_digest is not None:
        problem = f"this end was written after {run.name} had followed the run"
        yield JournalFinding(path=before.path / END, problem=problem)


def _on_chain(chained: Iterable[_Run], head: Head | None) -> set[str]:
    """Return the runs reachable from the newest; at a missing one, continue with the one before."""
    by_name = {run.name: run for run in chained}
    left = sorted(by_name)
    name = head.run if head is not None else left[-1]
    found: set[str] = set()
    while True:
        if name not in by_name:
            older = [one for one in left if one < name and one not in found]
            if not older:
                return found
            name = older[-1]
        found.add(name)
        follows = by_name[name].follows
        if follows is None or follows.run in found:
            return found
        name = follows.run


def _has_done_nothing(run: _Run, head: Head | None) -> bool:
    """Whether a run was interrupted before `head.json` named it: it has deleted nothing."""
    before = None if run.follows is None else run.follows.run
    return not run.batches and before == (None if head is None else head.run)
