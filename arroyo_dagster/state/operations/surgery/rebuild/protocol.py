"""What lost metadata of an epoch of the protocol layout was: its manifest, and the records around.

Each record is proven by another one that can be read: the epoch record by a later epoch that names
the checkpoint as its parent, the manifest by its epoch record, the commit marker by a later epoch.

Source: crates/arroyo-state-protocol/src/{state,resolve,workflow}.rs (arroyo-state.md 3).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TypeVar

from arroyo_dagster.errors import FormatError, NotFoundError, ProtocolError
from arroyo_dagster.state.codec import metadata, records
from arroyo_dagster.state.codec.derived import encode
from arroyo_dagster.state.metadata.tree import CheckpointTree, as_checkpoint
from arroyo_dagster.state.model.changes import JobHead
from arroyo_dagster.state.model.checkpoints import (
    Checkpoint,
    CheckpointState,
    CommittedMarker,
    CurrentGeneration,
    EpochRecord,
    GenerationManifest,
    Manifest,
)
from arroyo_dagster.state.model.ids import Epoch, OperatorId, StatePath, WorkerGeneration
from arroyo_dagster.state.model.job_facts import JobFacts
from arroyo_dagster.state.model.layout import JobPaths, parse_epoch_record, parse_manifest_path
from arroyo_dagster.state.model.numbers import parse_number
from arroyo_dagster.state.model.surgery.rebuild import RebuiltTable
from arroyo_dagster.state.operations.surgery.rebuild.operator import (
    LostEpoch,
    LostOperator,
    RebuiltEpoch,
    cannot_rebuild,
    check_not_rewritten,
    managed_job,
    nothing_lost,
    read_whole,
)
from arroyo_dagster.state.planning.restore import recovery
from arroyo_dagster.state.planning.restore.lost_metadata import cut_checkpoint, identity_mismatch
from arroyo_dagster.state.storage.store import ObjectInfo, ObjectStore

_T = TypeVar("_T")


@dataclass
class ReadableObjects:
    """What can be read of the metadata of a job, and what is noted of the rest.

    Attributes:
        listing: every object of the job.
        before: the bytes of each object that is missing (None) or damaged.
    """

    store: ObjectStore
    paths: JobPaths
    epoch: Epoch
    listing: dict[StatePath, ObjectInfo]
    before: dict[StatePath, bytes | None] = field(default_factory=dict)

    def _read(self, path: StatePath, decode: Callable[[bytes, str], _T]) -> _T | None:
        """Read an object; None if it is missing or damaged, which is noted."""
        return read_whole(self.store, path, decode, partial(self._damaged, path), self.before)

    def _damaged(self, path: StatePath, value: object) -> bool:
        """Return whether an object that decodes belongs elsewhere, or was cut."""
        if identity_mismatch(self.paths, path, value) is not None:
            return True
        if isinstance(value, Manifest):
            checkpoint = as_checkpoint(value, path, CheckpointState.READY)
            return any(cut_checkpoint(self.paths, checkpoint, self.listing))
        return False

    def _readable(self, path: StatePath, decode: Callable[[bytes, str], _T]) -> _T | None:
        try:
            value = decode(self.store.read(path), path)
        except (FormatError, NotFoundError):
            return None
        return None if self._damaged(path, value) else value

    @cached_property
    def _claims(self) -> dict[Epoch, EpochRecord]:
        """The epoch records that can be read, by epoch."""
        claims = {}
        for info in self.store.list_dir(self.paths.epochs).objects:
            if parse_epoch_record(info.path.name) is not None:
                record = self._readable(info.path, records.decode_epoch_record)
                if record is not None:
                    claims[record.epoch] = record
        return claims

    @cached_property
    def _generations(self) -> list[WorkerGeneration]:
        """The worker generations that have a directory, ascending."""
        names = {
            path.removeprefix(f"{self.paths.generations}/").partition("/")[0]
            for path in self.listing
            if path.startswith(f"{self.paths.generations}/")
        }
        return sorted(WorkerGeneration(n) for n in map(parse_number, names) if n is not None)

    def _directories(self, number: WorkerGeneration) -> list[Epoch]:
        """Return the epochs of which a worker generation has files, ascending."""
        return CheckpointTree(self.store, self.paths).checkpoint_dirs(number)

    @cached_property
    def _fence_number(self) -> WorkerGeneration | None:
        path = self.paths.current_generation
        fence = self._readable(path, records.decode_current_generation)
        return None if fence is None else fence.worker_generation

    def _child(self, ref: StatePath) -> EpochRecord | None:
        """Return a published epoch that has this checkpoint as its parent."""
        return next((claim for claim in self._claims.values() if claim.parent_ref == ref), None)

    def _unknown(self, reason: str) -> ProtocolError:
        return cannot_rebuild(self.paths, self.epoch, reason)


@dataclass
class ProtocolRebuild(ReadableObjects):
    """Collects the metadata of one epoch, and what is doubtful about it.

    Attributes:
        after: the bytes that lost objects get, in the order in which they are written: what leads
            to an object comes after it.
    """

    after: dict[StatePath, bytes] = field(default_factory=dict)
    source: dict[OperatorId, Epoch] = field(default_factory=dict)
    tables: list[RebuiltTable] = field(default_factory=list)
    doubts: list[str] = field(default_factory=list)

    def rebuilt(self, facts: JobFacts) -> RebuiltEpoch:
        """Return the epoch as it would be.

        Args:
            facts: what is known of the job's status; names its run, which is its generation.

        Raises:
            InputError: a managed job, or nothing is missing or damaged.
            ProtocolError: the metadata cannot be known.
            FormatError: a data file of the epoch is broken.
        """
        record = self._read(self.paths.epoch_record(self.epoch), records.decode_epoch_record)
        ref = self._owner() if record is None else record.checkpoint_ref
        recovery.expect_manifest_path(self.paths, ref)
        manifest = self._read(ref, metadata.decode_manifest)
        if manifest is None:
            if record is None:
                raise self._unknown(
                    "its manifest and its record are lost, so nothing shows that the epoch was "
                    "ever complete"
                )
            manifest = self._rebuilt_manifest(record)
            self.after[ref] = metadata.encode_manifest(manifest)
        if manifest.progress is not None:
            raise managed_job(self.paths)
        self._rebuild_marker(ref, manifest)
        claim = record or recovery.claim_of(ref, manifest, manifest.finish_time_micros)
        fence = self._rebuild_generations(claim, manifest, facts)
        if record is None:
            path = self.paths.epoch_record(self.epoch)
            self.after[path] = encode(claim)
        if fence is not None:
            data = encode(fence)
            self.after[self.paths.current_generation] = data
        if not self.after:
            raise nothing_lost(self.paths, self.epoch)
        return RebuiltEpoch(
            checkpoint=as_checkpoint(manifest, ref, CheckpointState.READY),
            before={path: self.before[path] for path in self.after},
            after=self.after,
            source=self.source,
            tables=tuple(self.tables),
            doubts=tuple(dict.fromkeys(self.doubts)),
            unlisted=(),
            head=JobHead(
                epoch=max((*self._claims, self.epoch)),
                worker_generation=self._fence_number if fence is None else fence.worker_generation,
            ),
        )

    # ---- which checkpoint owns the epoch ---------------------------------------------------------

    def _owner(self) -> StatePath:
        """Return the manifest of the epoch whose record is lost."""
        named = {c.parent_ref for c in self._claims.values() if c.parent_ref is not None}
        for ref in named:
            address = parse_manifest_path(ref)
            if address is not None and (address.paths, address.epoch) == (self.paths, self.epoch):
                return ref
        refs = [
            ref
            for number in self._generations
            if (ref := self.paths.manifest(number, self.epoch)) in self.listing
        ]
        if len(refs) != 1:
            raise self._unknown(
                f"its record is lost, and {len(refs)} worker generations have a manifest of it"
            )
        address = parse_manifest_path(refs[0])
        assert address is not None
        hint = self._readable(
            self.paths.generation_manifest(address.worker_generation),
            records.decode_generation_manifest,
        )
        if hint is None or hint.latest_ref != refs[0]:
            raise self._unknown(
                f"its record is lost, and nothing shows that {refs[0]} was ever published"
            )
        self.doubts.append(
            f"the record is made of the manifest, which generation {address.worker_generation} "
            "names as its latest; the next start of Arroyo would write the same record"
        )
        return refs[0]

    # ---- the manifest ----------------------------------------------------------------------------

    def _rebuilt_manifest(self, record: EpochRecord) -> Manifest:
        check_not_rewritten(self.store, self.paths, self.epoch)
        before = self._parent(record)
        lost = LostEpoch(
            self.epoch,
            before.finish_time_micros,
            record.created_at_micros,
            record.worker_generation,
        )
        self._check_known_files(before, record)
        committed = self._readable(
            recovery.marker_path(record.checkpoint_ref), records.decode_committed_marker
        )
        operators = []
        older = [before, *self._ancestors(before)]
        for operator in before.operators:
            work = LostOperator(self.paths, operator.operator, lost, older, (), self.listing)
            operators.append(work.rebuilt(self.store, None if committed is None else self.epoch))
            self.source[operator.operator] = before.epoch
            self.tables += work.tables
            self.doubts += work.doubts
        self.doubts.append(
            f"the epoch ends when its record was written and begins when epoch {before.epoch} "
            f"ended; its oldest kept epoch is that of epoch {before.epoch}"
        )
        return Manifest(
            pipeline=record.pipeline,
            job=record.job,
            worker_generation=record.worker_generation,
            epoch=self.epoch,
            min_epoch=before.min_epoch,
            start_time_micros=lost.start_time_micros,
            finish_time_micros=lost.finish_time_micros,
            needs_commit=any(operator.needs_commit for operator in operators),
            operators=tuple(operators),
            parent_ref=record.parent_ref,
        )

    def _parent(self, record: EpochRecord) -> Checkpoint:
        ref = record.parent_ref
        if ref is None:
            raise self._unknown("it is the first epoch of the job, so no older one describes it")
        recovery.expect_manifest_path(self.paths, ref)
        manifest = self._readable(ref, metadata.decode_manifest)
        if manifest is None:
            raise self._unknown(f"its parent {ref} cannot be read: rebuild that epoch first")
        if manifest.progress is not None:
            raise managed_job(self.paths)
        return as_checkpoint(manifest, ref, CheckpointState.READY)

    def _ancestors(self, before: Checkpoint) -> Iterator[Checkpoint]:
        """Yield the epochs before the parent, newest first: a table may be empty for a while."""
        for epoch in sorted(self._claims, reverse=True):
            ref = self._claims[epoch].checkpoint_ref
            older = self._readable(ref, metadata.decode_manifest) if epoch < before.epoch else None
            if older is not None:
                yield as_checkpoint(older, ref, CheckpointState.READY)

    def _check_known_files(self, before: Checkpoint, record: EpochRecord) -> None:
        """Check that no file of the epoch belongs to an operator that its parent lacks."""
        generation = record.worker_generation
        directory = self.paths.checkpoint(self.epoch, generation)
        prefixes = tuple(
            f"{self.paths.operator(operator.operator, self.epoch, generation)}/"
            for operator in before.operators
        )
        records_of = {record.checkpoint_ref, recovery.marker_path(record.checkpoint_ref)}
        for path in self.listing:
            inside = path.startswith(f"{directory}/") and path not in records_of
            if inside and not path.startswith(prefixes):
                raise self._unknown(
                    f"{path} belongs to an operator that epoch {before.epoch} lacks"
                )

    # ---- the records around it -------------------------------------------------------------------

    def _rebuild_marker(self, ref: StatePath, manifest: Manifest) -> None:
        """Write the commit marker anew if the commit is known to be finished.

        A marker is written after the commit, and an epoch is published after its parent's marker.
        The missing marker of the newest epoch is no damage: the next start commits it.
        """
        if not manifest.needs_commit:
            return
        path = recovery.marker_path(ref)
        if self._read(path, records.decode_committed_marker) is not None:
            return
        if self.before[path] is None and self._child(ref) is None:
            return
        marker = CommittedMarker(
            pipeline=manifest.pipeline,
            job=manifest.job,
            epoch=manifest.epoch,
            checkpoint_worker_generation=manifest.worker_generation,
            writer_worker_generation=manifest.worker_generation,
            checkpoint_ref=ref,
        )
        self.after[path] = encode(marker)

    def _rebuild_generations(
        self, claim: EpochRecord, manifest: Manifest, facts: JobFacts
    ) -> CurrentGeneration | None:
        """Write the manifests of worker generations anew, and return the fence if it is lost."""
        claims = {**self._claims, self.epoch: claim}
        for number in self._generations:
            if number < claim.worker_generation:
                continue
            path = self.paths.generation_manifest(number)
            if self._read(path, records.decode_generation_manifest) is not None:
                continue
            mine = [record for record in claims.values() if record.worker_generation == number]
            if not mine and self.before[path] is None:
                continue  # a start that ended before it wrote its own
            self.after[path] = self._generation_manifest(number, claims, manifest)
        path = self.paths.current_generation
        if self._read(path, records.decode_current_generation) is not None:
            return None
        number = WorkerGeneration(
            max(*self._generations, facts.run_id or 0, claim.worker_generation)
        )
        if facts.run_id is None:
            self.doubts.append(
                f"the fence names worker generation {number}, the newest with an object; no source "
                "names the job's run (--arroyo-api or --arroyo-db does)"
            )
        return CurrentGeneration(
            pipeline=claim.pipeline,
            job=claim.job,
            worker_generation=number,
            generation_manifest_ref=self.paths.generation_manifest(number),
            updated_at_micros=manifest.finish_time_micros,
        )

    def _generation_manifest(
        self, number: WorkerGeneration, claims: dict[Epoch, EpochRecord], manifest: Manifest
    ) -> bytes:
        """Return the start of a generation, and its latest published checkpoint."""
        mine = [claims[key] for key in sorted(claims) if claims[key].worker_generation == number]
        latest = self._newest_checkpoint(claims, lambda generation: generation == number)
        if mine or latest is not None:
            base = mine[0].parent_ref if mine else None
        else:
            base = self._newest_checkpoint(claims, lambda generation: generation < number)
        address = None if base is None else parse_manifest_path(base)
        if address is not None and address.worker_generation == number:
            base = None
            self.doubts.append(
                f"the checkpoint from which worker generation {number} was started is not known; a "
                "start needs it only if the latest one is lost"
            )
        new_manifest = GenerationManifest(
            pipeline=manifest.pipeline,
            job=manifest.job,
            worker_generation=number,
            base_ref=base,
            latest_ref=latest,
            updated_at_micros=manifest.finish_time_micros,
        )
        return encode(new_manifest)

    def _newest_checkpoint(
        self, claims: dict[Epoch, EpochRecord], wanted: Callable[[WorkerGeneration], bool]
    ) -> StatePath | None:
        """Return the newest checkpoint of the wanted generations.

        One without a record counts, if it is newer than all that have one: its record may be lost,
        and a start claims it. An older one in its place would lose its rows.
        """
        refs = {
            claim.epoch: claim.checkpoint_ref
            for claim in claims.values()
            if wanted(claim.worker_generation)
        }
        last = max(claims)
        for number in filter(wanted, self._generations):
            for epoch in self._directories(number):
                if epoch <= last:
                    continue
                ref = self.paths.manifest(number, epoch)
                if self._readable(ref, metadata.decode_manifest) is not None:
                    refs[epoch] = ref
                    self.doubts.append(f"{ref} has no epoch record: the next start claims it")
                else:
                    self.doubts.append(
                        f"worker generation {number} has files of epoch {epoch}, and neither a "
                        "record nor a manifest: a start restores an older epoch"
                    )
        return refs[max(refs)] if refs else None
