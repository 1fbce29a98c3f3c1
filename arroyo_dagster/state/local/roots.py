"""Everything of a job that refers to data files, read in full, or an error that says what is not.

Epochs are found by following references and numbers, never by a listing alone: a store may answer
a listing with less than there is, but not a read of an object that is there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

from arroyo_dagster.errors import ConflictError, NotFoundError, ProtocolError
from arroyo_dagster.state.backend import ParquetBackend, decode_by_name
from arroyo_dagster.state.codec import collecting as codec
from arroyo_dagster.state.codec import metadata, records
from arroyo_dagster.state.codec.references import manifest_references, operator_references
from arroyo_dagster.state.model.checkpoints import (
    RECORD_VERSION,
    CheckpointState,
    CurrentGeneration,
    EpochRecord,
    GenerationManifest,
    LegacyCheckpoint,
)
from arroyo_dagster.state.model.collecting import (
    EpochRoot,
    Quarantined,
    References,
    Retained,
    Root,
    Roots,
    digest_of,
)
from arroyo_dagster.state.model.ids import Epoch, OperatorId, StatePath, WorkerGeneration
from arroyo_dagster.state.model.layout import JobPaths, Layout
from arroyo_dagster.state.model.objects import Packed
from arroyo_dagster.state.planning import recovery
from arroyo_dagster.state.planning.reachable import check_roots, refuse
from arroyo_dagster.state.storage.concurrency import concurrently
from arroyo_dagster.state.storage.store import ObjectStore

T = TypeVar("T")
AT_ONCE = 64
"""So many epochs are read at a time."""

BEYOND = 8
"""In the legacy layout so many numbers after the newest epoch are looked at."""

NO_EPOCH = "the job has no epoch, so nothing says what is needed"
_TRIES = 3


Progress = Callable[[str, int, int | None], None]
"""Told what is being done, how much of it is done, and of how much: None if nobody knows yet."""


def untold(step: str, done: int, total: int | None) -> None:
    """Tell nobody."""


def read_roots(store: ObjectStore, paths: JobPaths, progress: Progress = untold) -> Roots:
    """Read every object of a job that refers to data files, each once.

    In the protocol layout nothing is listed: from the fence to the newest epoch and down its
    parents. What owns no epoch, and compactions that wait, only a listing shows: see
    `state.local.survey`.

    Raises:
        ProtocolError: what was read does not add up, so that nothing may be collected.
        FormatError: an object does not decode. NotFoundError: one is missing.
        ConflictError: the job goes on faster than it can be read.
    """
    legacy = paths.layout is Layout.LEGACY
    look = _legacy if legacy else _protocol
    return _settled(paths, lambda: look(Reader(store, paths), progress))


def _settled(paths: JobPaths, look: Callable[[], Roots | None]) -> Roots:
    """Look until nothing has changed meanwhile; refuse only what is wrong every time."""
    wrong: ProtocolError | None = None
    for _ in range(_TRIES):
        try:
            found = look()
            if found is not None:
                check_roots(found)
                return found
        except ProtocolError as error:
            wrong = error
    if wrong is not None:
        raise wrong
    raise ConflictError(
        "the job's epochs changed faster than they could be read",
        job=paths.root,
        retryable=True,
        next_step="try again, or let the job keep more epochs; nothing was deleted",
    )


def newest_root(store: ObjectStore, paths: JobPaths) -> EpochRoot | None:
    """The epoch that a start would go on from; None for a job that has none.

    Raises:
        ProtocolError, FormatError, NotFoundError: as `read_roots`.
    """
    reader = Reader(store, paths)
    if paths.layout is Layout.LEGACY:
        numbers = sorted(ParquetBackend(store, paths).checkpoint_dirs(), reverse=True)
        newest = _newest_legacy(reader, numbers)
        return None if newest is None else _legacy_epoch(reader, newest)
    fence = reader.required(paths.current_generation, records.decode_current_generation)
    head = _head(reader, fence)
    return None if head is None else head[0]


class Reader:
    """Reads objects of one job, each once, and remembers what it read as roots."""

    def __init__(self, store: ObjectStore, paths: JobPaths) -> None:
        self.store = store
        self.paths = paths
        self.roots: dict[StatePath, Root] = {}
        self._early: dict[StatePath, bytes | None] = {}

    def optional(self, path: StatePath, decode: Callable[[bytes, str], T]) -> T | None:
        """Read an object; None if there is none."""
        data = self._early.pop(path) if path in self._early else self._bytes(path)
        if data is None:
            return None
        value = decode(data, path)
        self._check_version(path, value)
        self.roots[path] = Root(path=path, digest=digest_of(data), time_micros=_time_of(value))
        return value

    def required(self, path: StatePath, decode: Callable[[bytes, str], T]) -> T:
        """Read an object that something refers to."""
        value = self.optional(path, decode)
        if value is None:
            raise refuse("an object that must be there is missing", self.paths, path=path)
        return value

    def early(self, path: StatePath) -> recovery.Record | None:
        """Read an object that will be asked for once more; then it is not read again."""
        data = self._early[path] = self._bytes(path)
        if data is None:
            return None
        value = decode_by_name(data, path)
        self._check_version(path, value)
        self.roots[path] = Root(path=path, digest=digest_of(data), time_micros=_time_of(value))
        return value

    def _bytes(self, path: StatePath) -> bytes | None:
        try:
            return self.store.read(path)
        except NotFoundError:
            return None

    def _check_version(self, path: StatePath, value: object) -> None:
        version = getattr(value, "version", RECORD_VERSION)
        if version != RECORD_VERSION:
            raise refuse(
                f"a record of version {version}: this release knows version {RECORD_VERSION}",
                self.paths,
                path=path,
                next_step="use a release of arroyo-dagster that knows it; nothing was deleted",
            )

    def taken(self, found: Iterable[StatePath]) -> tuple[Root, ...]:
        """What was read of these paths, in their order; no longer part of what is left."""
        return tuple(self.roots.pop(path) for path in found if path in self.roots)

    def retained(self) -> tuple[Retained, tuple[Quarantined, ...]]:
        """Pins, and what lies in quarantine."""
        found = self.optional(self.paths.retained, codec.decode_retained) or Retained()
        names = found.quarantines
        aside = concurrently(
            lambda name: self.required(
                self.paths.quarantine / name / "index.json",
                functools.partial(codec.decode_quarantined, name=name),
            ),
            names,
        )
        return found, tuple(aside)


def _time_of(value: object) -> int | None:
    for name in ("finish_time_micros", "created_at_micros", "updated_at_micros"):
        found = getattr(value, name, None)
        if isinstance(found, int):
            return found
    return None


# ---- protocol ------------------------------------------------------------------------------------


def _protocol(reader: Reader, progress: Progress) -> Roots | None:
    """The roots of a job of the protocol layout; None: it changed meanwhile, look again."""
    paths = reader.paths
    fence = reader.required(paths.current_generation, records.decode_current_generation)
    retained, aside = reader.retained()
    found = _head(reader, fence)
    if found is None:
        raise refuse(NO_EPOCH, paths, path=paths.current_generation)
    head, restorable, asked = found
    epochs = [head]
    for epoch in _below(reader, head):
        epochs.append(epoch)
        if len(epochs) % AT_ONCE == 0:
            progress("read epochs", len(epochs), head.epoch)
    if head.parent_ref is not None and len(epochs) == 1:
        # Its direct parent is never collected: either somebody did, or there is a newer epoch.
        again = _head(Reader(reader.store, paths), fence)
        if again is not None and again[0].ref == head.ref:
            raise refuse("the parent of the newest epoch is missing", paths, path=head.parent_ref)
        return None
    for pin in sorted(retained.ever_pinned, reverse=True):
        if pin < epochs[-1].epoch:
            epochs += _pinned(reader, pin)
    data = reader.store.read(paths.current_generation)
    if records.decode_current_generation(data, paths.current_generation) != fence:
        return None
    generations = {path: found for path, found in asked.items() if found is not None}
    own = generations.get(paths.generation_manifest(fence.worker_generation))
    numbers = sorted(found.worker_generation for found in generations.values())
    return Roots(
        paths=paths,
        worker_generation=fence.worker_generation,
        resolved_from=numbers[0] if numbers else None,
        restorable=restorable,
        restored=own.base_ref if own else None,
        epochs=tuple(epochs),
        attempts=_unowned(reader, epochs),
        retained=retained,
        quarantined=aside,
        generations=tuple(numbers),
        more=tuple(reader.roots.values()),
    )


def _head(
    reader: Reader, fence: CurrentGeneration
) -> tuple[EpochRoot, Epoch, dict[StatePath, GenerationManifest | None]] | None:
    """The epoch that a start would go on from, the one that an Arroyo would, and by which way.

    None: no worker generation leads to an epoch.
    """
    facts: dict[StatePath, recovery.Record | None] = {reader.paths.current_generation: fence}
    found = _resolved(reader, fence, facts, as_arroyo=False)
    by_arroyo = _resolved(reader, fence, facts, as_arroyo=True)
    if found is None or by_arroyo is None:
        return None
    state = CheckpointState.COMMITTING if found.replay_commit else CheckpointState.READY
    references = reader.required(found.ref, manifest_references)
    path = reader.paths.epoch_record(references.epoch)
    reader.required(path, records.decode_epoch_record)
    root = epoch_root(reader.paths, found.ref, references, state, reader.taken((found.ref, path)))
    generations = {
        path: fact
        for path, fact in facts.items()
        if path.name == "generation-manifest.json"
        and (fact is None or isinstance(fact, GenerationManifest))
    }
    return root, by_arroyo.manifest.epoch, generations


def _resolved(
    reader: Reader,
    fence: CurrentGeneration,
    facts: dict[StatePath, recovery.Record | None],
    *,
    as_arroyo: bool,
) -> recovery.Restore | None:
    starting = WorkerGeneration(fence.worker_generation + 1)
    while True:
        found = recovery.resolve(reader.paths, starting, facts, now_micros=0, as_arroyo=as_arroyo)
        if isinstance(found, recovery.Restore):
            return found
        if isinstance(found, recovery.CannotStart):
            raise refuse(f"it cannot be restored: {found.reason}", reader.paths, path=found.ref)
        if not isinstance(found, recovery.Need):
            return None
        facts[found.path] = reader.early(found.path)


def epoch_root(
    paths: JobPaths,
    ref: StatePath,
    found: References,
    state: CheckpointState,
    roots: tuple[Root, ...],
    gone: tuple[StatePath, ...] = (),
) -> EpochRoot:
    """An epoch, or an attempt at one, by what its metadata refers to."""
    root = f"{paths.root}/"
    return EpochRoot(
        epoch=found.epoch,
        worker_generation=found.worker_generation,
        ref=ref,
        parent_ref=found.parent_ref,
        state=state,
        min_epoch=found.min_epoch,
        start_time_micros=found.start_time_micros,
        finish_time_micros=found.finish_time_micros,
        needs_commit=found.needs_commit,
        operators=_shared(found.operators),
        ours=found.ours,
        files=Packed.of_paths(found.files),
        outside=next((path for path in found.files if not path.startswith(root)), None),
        gone=gone,
        roots=roots,
    )


@functools.lru_cache(maxsize=64)
def _shared(operators: tuple[tuple[OperatorId, int], ...]) -> tuple[tuple[OperatorId, int], ...]:
    """The same operators as one object: every epoch of a job has them."""
    return operators


def _below(reader: Reader, newest: EpochRoot) -> Iterator[EpochRoot]:
    """Follow the parents of an epoch, many at a time: newest first, until one is not there."""
    while newest.parent_ref is not None:
        for found in _some_below(reader, newest):
            if found is None:
                return
            yield found
            newest = found


def _some_below(reader: Reader, newest: EpochRoot) -> Iterator[EpochRoot | None]:
    """The next parents, None behind the last. Their numbers are tried before they are known."""
    paths = reader.paths
    numbers = [Epoch(n) for n in range(newest.epoch - 1, max(-1, newest.epoch - 1 - AT_ONCE), -1)]
    claims = concurrently(
        lambda n: reader.optional(paths.epoch_record(n), records.decode_epoch_record), numbers
    )
    refs = [None if claim is None else claim.checkpoint_ref for claim in claims]
    for ref in refs:
        if ref is not None:
            recovery.expect_manifest_path(paths, ref)
    if newest.parent_ref not in refs:
        yield _without_record(reader, newest, claims)
        return
    manifests = concurrently(
        lambda ref: None if ref is None else reader.optional(ref, manifest_references), refs
    )
    for claim, manifest in zip(claims, manifests, strict=True):
        if newest.parent_ref is None:
            yield None
            return
        if claim is None or claim.checkpoint_ref != newest.parent_ref:
            # A collection has begun with records: the manifest tells how it goes on.
            yield _without_record(reader, newest, [claim])
            return
        if manifest is None:
            _check_vanished(reader, newest, claim)
            yield None
            return
        ref = claim.checkpoint_ref
        roots = reader.taken((ref, paths.epoch_record(claim.epoch)))
        newest = _checked(reader, newest, ref, manifest, CheckpointState.READY, roots)
        yield newest


def _without_record(
    reader: Reader, newest: EpochRoot, claims: Sequence[EpochRecord | None]
) -> EpochRoot | None:
    ref = newest.parent_ref
    assert ref is not None
    recovery.expect_manifest_path(reader.paths, ref)
    manifest = reader.optional(ref, manifest_references)
    if manifest is None:
        return None
    claim = next((c for c in claims if c is not None and c.epoch == manifest.epoch), None)
    if claim is not None:
        raise refuse(
            f"epoch {newest.epoch} goes back to a checkpoint that does not own its epoch",
            reader.paths,
            path=ref,
            owner=claim.checkpoint_ref,
        )
    roots = reader.taken((ref,))
    state = CheckpointState.PARTIALLY_COLLECTED
    return _checked(reader, newest, ref, manifest, state, roots)


def _checked(
    reader: Reader,
    newest: EpochRoot,
    ref: StatePath,
    manifest: References,
    state: CheckpointState,
    roots: tuple[Root, ...],
) -> EpochRoot:
    if manifest.epoch >= newest.epoch:
        raise refuse(
            f"the parent of epoch {newest.epoch} says that it is epoch {manifest.epoch}",
            reader.paths,
            path=ref,
        )
    address = recovery.expect_manifest_path(reader.paths, ref)
    if (manifest.pipeline, manifest.job) != (reader.paths.pipeline, reader.paths.job):
        raise refuse("a manifest is of another job", reader.paths, path=ref, found=manifest.job)
    if address.epoch != manifest.epoch:
        raise refuse(
            f"a manifest lies where epoch {address.epoch} belongs and says {manifest.epoch}",
            reader.paths,
            path=ref,
        )
    missing = (reader.paths.epoch_record(manifest.epoch),)
    gone = missing if state is CheckpointState.PARTIALLY_COLLECTED else ()
    return epoch_root(reader.paths, ref, manifest, state, roots, gone)


def _check_vanished(reader: Reader, newest: EpochRoot, claim: EpochRecord) -> None:
    """A record without its manifest: collected between the two reads, or damage."""
    path = reader.paths.epoch_record(claim.epoch)
    if reader.store.head(path) is None:
        reader.roots.pop(path, None)
        return
    raise refuse(
        f"epoch {claim.epoch} has a record and no manifest",
        reader.paths,
        path=claim.checkpoint_ref,
        newer=newest.ref,
    )


def _pinned(reader: Reader, pin: Epoch) -> list[EpochRoot]:
    """A pinned epoch below those that follow each other, and what hangs on it."""
    path = reader.paths.epoch_record(pin)
    claim = reader.optional(path, records.decode_epoch_record)
    if claim is None:
        return []  # told by `check_roots`
    recovery.expect_manifest_path(reader.paths, claim.checkpoint_ref)
    manifest = reader.required(claim.checkpoint_ref, manifest_references)
    roots = reader.taken((claim.checkpoint_ref, path))
    one = epoch_root(reader.paths, claim.checkpoint_ref, manifest, CheckpointState.READY, roots)
    return [one, *_below(reader, one)]


def _unowned(reader: Reader, epochs: Sequence[EpochRoot]) -> tuple[EpochRoot, ...]:
    """Manifests that a start would look at and that own no epoch: what they list stays."""
    known = {one.ref for one in epochs}
    refs = [ref for ref in reader.roots if ref.name == "checkpoint-manifest.pb"]
    found = (attempt(reader, ref) for ref in refs if ref not in known)
    return tuple(one for one in found if one is not None)


def attempt(reader: Reader, ref: StatePath) -> EpochRoot | None:
    """A manifest that owns no epoch, with its state; None if it is not there any more."""
    manifest = reader.optional(ref, manifest_references)
    if manifest is None:
        return None
    path = reader.paths.epoch_record(manifest.epoch)
    claim = reader.optional(path, records.decode_epoch_record)
    state = CheckpointState.UNCLAIMED
    if claim is not None:
        owns = claim.checkpoint_ref == ref
        state = CheckpointState.READY if owns else CheckpointState.ORPHANED
    return epoch_root(reader.paths, ref, manifest, state, reader.taken((ref, path)))


# ---- legacy --------------------------------------------------------------------------------------


def _legacy(reader: Reader, progress: Progress) -> Roots | None:
    """The roots of a job of the legacy layout; None: it changed meanwhile, look again."""
    backend = ParquetBackend(reader.store, reader.paths)
    retained, aside = reader.retained()
    numbers = sorted(backend.checkpoint_dirs(), reverse=True)
    newest = _newest_legacy(reader, numbers)
    if newest is None:
        raise refuse(NO_EPOCH, reader.paths)
    wanted = [n for n in numbers if n <= newest]
    found: list[EpochRoot] = []
    for at in range(0, len(wanted), AT_ONCE):
        some = concurrently(lambda n: _legacy_epoch(reader, n), wanted[at : at + AT_ONCE])
        found += [one for one in some if one is not None]
        progress("read epochs", min(len(wanted), at + AT_ONCE), len(wanted))
    if reader.store.head(reader.paths.legacy_metadata(newest)) is None:
        return None
    return Roots(
        paths=reader.paths,
        worker_generation=None,
        epochs=tuple(found),
        retained=retained,
        quarantined=aside,
        more=tuple(reader.roots.values()),
    )


def _newest_legacy(reader: Reader, numbers: Sequence[Epoch]) -> Epoch | None:
    """The newest epoch, by a listing and by looking where it might have been cut short."""
    paths, store = reader.paths, reader.store

    def there(number: Epoch) -> bool:
        return store.head(paths.legacy_metadata(number)) is not None

    listed = next((number for number in numbers if there(number)), None)
    first = listed or 0
    beyond = [Epoch(n) for n in range(first + 1, first + 1 + BEYOND) if n not in numbers]
    unseen = [
        n for n, is_there in zip(beyond, concurrently(there, beyond), strict=True) if is_there
    ]
    fresh = {*ParquetBackend(store, paths).checkpoint_dirs()} if unseen else set()
    hidden = [number for number in unseen if number not in fresh]
    if hidden:
        raise refuse(
            f"the listing is incomplete: epoch {hidden[-1]} is there and was not listed",
            paths,
            path=paths.legacy_metadata(hidden[-1]),
            next_step="check the store, or what lies between it and here, then try again",
        )
    return listed


def _legacy_epoch(reader: Reader, epoch: Epoch) -> EpochRoot | None:
    paths = reader.paths
    ref = paths.legacy_metadata(epoch)
    head = reader.optional(ref, metadata.decode_legacy_checkpoint)
    if head is None:
        return None
    _check_own(reader, head, ref, epoch)
    names = {name: paths.operator_metadata(name, epoch) for name in head.operators}
    parts = [reader.optional(path, operator_references) for path in names.values()]
    gone = [p for p, part in zip(names.values(), parts, strict=True) if part is None]
    known = [part for part in parts if part is not None]
    for name, part in zip(names, parts, strict=True):
        if part is not None and (part.job, part.operators[0][0]) != (paths.job, name):
            raise refuse("operator metadata is of another operator", paths, path=names[name])
    found = References(
        job=head.job,
        epoch=epoch,
        min_epoch=head.min_epoch,
        start_time_micros=head.start_time_micros,
        finish_time_micros=head.finish_time_micros,
        needs_commit=any(part.needs_commit for part in known),
        operators=tuple((name, _parallelism(parts, name)) for name in names),
        ours=head.progress is not None,
        files=tuple(dict.fromkeys(path for part in known for path in part.files)),
    )
    roots = reader.taken((ref, *names.values()))
    return epoch_root(reader.paths, ref, found, CheckpointState.READY, roots, tuple(gone))


def _parallelism(parts: Sequence[References | None], name: OperatorId) -> int:
    known = {part.operators[0][0]: part.operators[0][1] for part in parts if part is not None}
    return known.get(name, 0)


def _check_own(reader: Reader, head: LegacyCheckpoint, ref: StatePath, epoch: Epoch) -> None:
    if (head.job, head.epoch) != (reader.paths.job, epoch):
        raise refuse(
            f"checkpoint metadata says that it is epoch {head.epoch} of {head.job}",
            reader.paths,
            path=ref,
        )
