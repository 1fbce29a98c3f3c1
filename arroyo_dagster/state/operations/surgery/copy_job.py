"""Copy a whole job to another checkpoint URL: data, then metadata, then what makes it startable.

The source is read only, under its lease and with its epochs pinned, so that nothing is deleted
meanwhile. The copy is verified at its URL before a start can find it. An interrupted copy is
continued by the next call: objects that are there already are compared, never overwritten.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from arroyo_dagster.errors import (
    ConflictError,
    FormatError,
    InputError,
    NotFoundError,
    ProtocolError,
)
from arroyo_dagster.redaction import redact_url
from arroyo_dagster.state.codec.derived import encode
from arroyo_dagster.state.codec.metadata import decode_manifest
from arroyo_dagster.state.codec.records import CopyMarker, decode_copy_marker
from arroyo_dagster.state.metadata.backend import ParquetBackend
from arroyo_dagster.state.metadata.lease import (
    Leased,
    LeasedOperation,
    LeaseOptions,
    lease,
)
from arroyo_dagster.state.metadata.tree import CheckpointTree
from arroyo_dagster.state.model.changes import ChangeKind, is_change_of
from arroyo_dagster.state.model.checkpoints import (
    CheckpointState,
    CurrentGeneration,
    GenerationManifest,
)
from arroyo_dagster.state.model.garbage import EpochRoot, Roots, digest_of
from arroyo_dagster.state.model.ids import Epoch, StatePath
from arroyo_dagster.state.model.layout import JobPaths, Layout
from arroyo_dagster.state.model.objects import Packed, StoredObject
from arroyo_dagster.state.model.progress import OnProgress, no_progress
from arroyo_dagster.state.model.surgery.copies import CopyOutcome, CopyPlan
from arroyo_dagster.state.operations.catalog.metadata_only import metadata_only_epochs
from arroyo_dagster.state.operations.gc.copies import digest_stored, in_turn
from arroyo_dagster.state.operations.gc.pins import (
    note_expired,
    pinned_while,
)
from arroyo_dagster.state.operations.gc.roots import read_roots
from arroyo_dagster.state.operations.progress import counter
from arroyo_dagster.state.operations.surgery.plan import check_approved
from arroyo_dagster.state.operations.verify.job import verify_job
from arroyo_dagster.state.planning.gc.reachability import metadata_of, records_of
from arroyo_dagster.state.planning.restore.reads import is_at_rest
from arroyo_dagster.state.storage.concurrency import concurrently
from arroyo_dagster.state.storage.store import ObjectStore, read_optional
from arroyo_dagster.state.storage.wrappers import Extended

REASON = "a copy of the job is under way"
_KEPT_BESIDE = ("topics", "stdin", "landed", "spark", "spark-sinks")
"""Directories of rows that sources read again, and that sinks have not committed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyOptions(LeasedOperation):
    """Options of a copy, with a lease at both URLs.

    Attributes:
        approved: the digest of the plan that a person has reviewed; None = not asked for.
        verify_level: at which the copy is verified before it becomes active.
        on_progress: called with how many objects were copied.
    """

    approved: str | None = None
    owner: str = "arroyo-state copy"
    verify_level: int = 2
    on_progress: OnProgress = no_progress


def plan_copy(
    source: ObjectStore, paths: JobPaths, target: ObjectStore, epoch: int | None = None
) -> CopyPlan:
    """Plan a copy. Writes nothing: this is the dry run.

    Args:
        epoch: copy only this epoch, and its parent, which recovery needs; None = all epochs that
            lead to the newest without a gap.

    Raises:
        ConflictError: the target has a job of that name.
        NotFoundError: there is no such epoch.
        InputError: rows that the epoch would read again are kept beside the newest epoch only.
        ProtocolError, FormatError: the epoch is not complete, or its commit is not finished.
    """
    check_target(source, target, paths)
    roots = read_roots(source, paths)
    epochs = _chosen(roots, epoch)
    head = epochs[0]
    beside = list(_beside(source, paths))
    if beside and (epoch is not None or not _at_rest(source, paths, head)):
        raise InputError(
            "the job keeps rows of its sources or sinks beside its newest epoch",
            job=paths.root,
            path=beside[0],
            next_step="stop it, and copy it as a whole, without @EPOCH",
        )
    bare = metadata_only_epochs(source, paths).keys()
    files = dict.fromkeys(
        path for root in epochs if root.epoch not in bare for path in root.files.paths
    )
    changes = [info.path for info in source.list_dir(paths.changes).objects]
    edits = [path for path in changes if is_change_of(paths, path, ChangeKind.EDIT)]
    copied = {root.epoch for root in epochs}
    return CopyPlan(
        pipeline=paths.pipeline,
        job=paths.job,
        source=redact_url(source.url),
        target=redact_url(target.url),
        epoch=head.epoch,
        epochs=tuple(sorted(copied - bare)),
        worker_generation=head.worker_generation,
        data=_measured(source, [*files, *beside], required=True),
        metadata=_measured(source, [*edits, *_metadata(paths, epochs)], required=False),
        left_out=tuple(sorted({root.epoch for root in roots.epochs} - copied)),
        warnings=tuple(_warnings(head)),
    )


def check_target(source: ObjectStore, target: ObjectStore, paths: JobPaths) -> bool:
    """Check that the target has no job of that name, and return whether a copy was begun.

    Raises:
        ConflictError: it has one, or a copy from another place was begun there.
    """
    if source.url == target.url:
        raise InputError("source and target are the same checkpoint URL", url=target.url)
    data = read_optional(target, paths.copy_marker)
    if data is not None:
        begun = decode_copy_marker(data, paths.copy_marker).source
        if begun != redact_url(source.url):
            raise ConflictError(
                f"a copy of the job from {begun} was begun at the target",
                job=paths.root,
                path=paths.copy_marker,
                next_step="finish that copy, or delete the job's prefix at the target",
            )
        return True
    with contextlib.suppress(NotFoundError):
        leases = f"{paths.leases}/"
        for info in target.list(paths.root):
            if not info.path.startswith(leases):
                raise ConflictError(
                    "the target has a job of that name",
                    job=paths.root,
                    path=info.path,
                    next_step="choose another checkpoint URL; nothing was changed",
                )
    return False


def _chosen(roots: Roots, epoch: int | None) -> list[EpochRoot]:
    """Return the epochs to copy, newest first."""
    by_number = {root.epoch: root for root in roots.epochs}
    if epoch is None:
        ready = (root for root in roots.current if _whole(root))
        head = next((root for root in ready if root.state is CheckpointState.READY), None)
        if head is None:
            raise ProtocolError("the job has no complete epoch", job=roots.paths.root)
    else:
        root = by_number.get(Epoch(epoch))
        if root is None:
            raise NotFoundError(
                "the job has no such epoch",
                job=roots.paths.root,
                epoch=epoch,
                next_step="`arroyo-state epochs` lists those that exist",
            )
        head = root
        if not _whole(head) or head.state is not CheckpointState.READY:
            raise ProtocolError(
                f"the epoch cannot be restored: {head.unreadable or head.state.value}",
                job=roots.paths.root,
                epoch=epoch,
                next_step="choose another epoch",
            )
    parents = [root for root in roots.epochs if root.ref == head.parent_ref and _whole(root)]
    if epoch is not None:
        return [head, *parents]
    chain = [head]
    while (before := by_number.get(Epoch(chain[-1].epoch - 1))) is not None and _whole(before):
        chain.append(before)
    return [*chain, *(root for root in parents if root not in chain)]


def _whole(one: EpochRoot) -> bool:
    return one.unreadable is None and not one.gone and one.outside is None


def _at_rest(store: ObjectStore, paths: JobPaths, head: EpochRoot) -> bool:
    newest = ParquetBackend(store, paths).load_checkpoint_metadata(head.epoch)
    return is_at_rest(newest, CheckpointTree(store, paths).fence())


def _beside(store: ObjectStore, paths: JobPaths) -> Iterator[StatePath]:
    for name in _KEPT_BESIDE:
        yield from (info.path for info in store.list(paths.maintenance / name))


def _metadata(paths: JobPaths, chosen: Iterable[EpochRoot]) -> list[StatePath]:
    """Return the metadata of epochs; what makes one exist comes after all that it needs."""
    oldest_first = sorted(chosen, key=lambda root: root.epoch)
    records = [path for root in oldest_first for path in records_of(paths, root)]
    metadata = [path for root in oldest_first for path in metadata_of(paths, root)]
    if paths.layout is Layout.PROTOCOL:
        return [*metadata, *records]
    # The newest epoch becomes visible first: a start must never continue from an older one.
    heads = [root.ref for root in reversed(oldest_first)]
    return [*records, *(path for path in metadata if path not in heads), *heads]


def _measured(store: ObjectStore, paths: list[StatePath], *, required: bool) -> Packed:
    infos = concurrently(store.head, paths)
    objects = []
    for path, info in zip(paths, infos, strict=True):
        if info is not None:
            objects.append(StoredObject(path, info.size_bytes, info.modified_micros, info.etag))
        elif required:
            raise FormatError("a file that an epoch lists is missing", path=path)
    return Packed(objects)


def _warnings(head: EpochRoot) -> Iterator[str]:
    yield (
        "both jobs have the same sinks: stop the source for good before the copy is started, or "
        "change the sinks of one"
    )
    if not head.managed:
        yield (
            "Arroyo's database does not know the copy: create the pipeline with this checkpoint "
            "URL and the same ids, or restore the database as well"
        )


# ---- execution -----------------------------------------------------------------------------------


def run_copy(
    source: ObjectStore,
    paths: JobPaths,
    target: ObjectStore,
    epoch: int | None = None,
    options: CopyOptions | None = None,
) -> CopyOutcome:
    """Copy a job, prove each object by its digest, verify the copy, then make it startable.

    Raises:
        ConflictError: the target has a job of that name, or another object at a path of it; or
            another plan was approved.
        ProtocolError: the copy does not pass verification; it is not active.
        LeaseHeldError: another process maintains the job, at one of the URLs.
        NotFoundError, FormatError: an object was deleted meanwhile; run it again.
    """
    run_options = options or CopyOptions()
    plan = plan_copy(source, paths, target, epoch)
    check_approved(plan.digest, run_options.approved, job=paths.root)
    ways, owner = LeaseOptions.of(run_options), run_options.owner
    clock, sleep = run_options.clock, run_options.sleep
    with (
        lease(source, paths, owner, ways) as from_,
        # The job's own retention may be about to take them.
        pinned_while(from_, paths, plan.epochs, REASON, owner, clock, sleep),
        lease(target, paths, owner, ways) as to,
    ):
        # Planned again: what has expired before the pins were there is left out.
        return _Copy(from_, to, paths, plan_copy(from_, paths, to, epoch), run_options).run()


@dataclass(slots=True)
class _Copy:
    source: Leased
    target: Leased
    paths: JobPaths
    plan: CopyPlan
    options: CopyOptions
    copied: int = 0
    present: int = 0
    digests: dict[StatePath, str] = field(default_factory=dict)

    def run(self) -> CopyOutcome:
        self.target.put(self.paths.copy_marker, encode(CopyMarker(source=self.plan.source)))
        if self.plan.epochs[0] > 1:
            note_expired(self.target, self.paths, self.plan.epochs[0])
        count = counter(self.options.on_progress, "copied objects", self.plan.objects)

        def copy(one: StoredObject) -> tuple[StatePath, str, bool]:
            copied = self._copy_one(one)
            count()
            return copied

        for path, digest, new in concurrently(copy, list(self.plan.data)):
            self._note(path, digest, new=new)
        metadata = {file.path: self.source.read(file.path) for file in self.plan.metadata}
        active = self._activation(metadata)
        self._verify(Extended(self.target, {**self._absent(metadata), **self._absent(active)}))
        for path, data in metadata.items():
            new = self._create(path, data)
            self._note(path, digest_of(data), new=new)
            count()
        for path, data in active.items():
            self._create(path, data)
        self._verify(self.target)
        self.target.delete_many([self.paths.copy_marker])
        return CopyOutcome(
            plan=self.plan,
            copied=self.copied,
            present=self.present,
            digests=self.digests,
            done=True,
        )

    def _note(self, path: StatePath, digest: str, *, new: bool) -> None:
        self.digests[path] = digest
        self.copied += new
        self.present += not new

    def _copy_one(self, one: StoredObject) -> tuple[StatePath, str, bool]:
        """Copy one object unless it is there, and prove that both have the same bytes."""
        with in_turn(one.size_bytes):
            data = self.source.read(one.path)
            new = self.target.create(one.path, data)
            digest = digest_of(data)
            if digest_stored(self.target, one.path)[0] != digest:
                raise self._other(one.path)
        return one.path, digest, new

    def _create(self, path: StatePath, data: bytes) -> bool:
        new = self.target.create(path, data)
        if self.target.read(path) != data:
            raise self._other(path)
        return new

    def _other(self, path: StatePath) -> ConflictError:
        return ConflictError(
            "the target has another object at this path: the source has changed since an "
            "interrupted copy, or the copy was started",
            job=self.paths.root,
            path=path,
            next_step="delete the job's prefix at the target, unless the job runs there, and copy "
            "again",
        )

    def _absent(self, objects: Mapping[StatePath, bytes]) -> dict[StatePath, bytes]:
        """Return those that do not exist at the target yet."""
        infos = concurrently(self.target.head, list(objects))
        pairs = zip(objects.items(), infos, strict=True)
        return {path: data for (path, data), info in pairs if info is None}

    def _activation(self, metadata: Mapping[StatePath, bytes]) -> dict[StatePath, bytes]:
        """Return what a start looks for first: the fence, and the generation that it names.

        Their times are those of the newest epoch, so that a further call writes the same bytes.
        """
        generation, pipeline = self.plan.worker_generation, self.plan.pipeline
        if generation is None or pipeline is None:
            return {}
        ref = self.paths.manifest(generation, self.plan.epoch)
        assert ref in metadata
        head = decode_manifest(metadata[ref], ref)
        path = self.paths.generation_manifest(generation)
        manifest = GenerationManifest(
            pipeline=pipeline,
            job=self.plan.job,
            worker_generation=generation,
            base_ref=head.parent_ref,
            latest_ref=ref,
            updated_at_micros=head.finish_time_micros,
        )
        fence = CurrentGeneration(
            pipeline=pipeline,
            job=self.plan.job,
            worker_generation=generation,
            generation_manifest_ref=path,
            updated_at_micros=head.finish_time_micros,
        )
        return {
            path: encode(manifest),
            self.paths.current_generation: encode(fence),
        }

    def _verify(self, store: ObjectStore) -> None:
        report = verify_job(store, self.paths, self.plan.epoch, level=self.options.verify_level)
        if report.verdict.errors:
            first = report.verdict.errors[0]
            raise ProtocolError(
                f"the copy does not pass verification: {first.code}: {first.evidence}",
                job=self.paths.root,
                path=first.object,
                next_step="verify the source; it is unchanged, and the copy is not active",
            )
