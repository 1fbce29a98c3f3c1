"""The worker generation that a process writes as: taken, fenced, kept in its manifest.

Source: crates/arroyo-state-protocol/src/{store,workflow}.rs.
"""

from __future__ import annotations

from dataclasses import replace

from arroyo_dagster.errors import ConflictError, InputError, NotFoundError
from arroyo_dagster.state.codec.derived import encode
from arroyo_dagster.state.metadata.tree import ProtocolTree
from arroyo_dagster.state.model.checkpoints import CurrentGeneration, GenerationManifest
from arroyo_dagster.state.model.clock import Clock
from arroyo_dagster.state.model.ids import PipelineId, StatePath, WorkerGeneration
from arroyo_dagster.state.model.layout import parse_epoch_record
from arroyo_dagster.state.planning.restore import recovery
from arroyo_dagster.state.planning.restore.lost_metadata import check_own
from arroyo_dagster.state.storage.concurrency import concurrently
from arroyo_dagster.state.storage.store import ObjectStore, check_size


class GenerationWriter(ProtocolTree):
    """A job's metadata, for a process that is one of the job's worker generations."""

    clock: Clock
    generation: WorkerGeneration | None
    """None before one is taken."""
    _manifest: GenerationManifest | None = None
    """The manifest of the worker generation that this process has taken."""

    @property
    def _pipeline(self) -> PipelineId:
        """The pipeline, which every job of this layout has."""
        assert self.paths.pipeline is not None
        return self.paths.pipeline

    @property
    def _taken(self) -> WorkerGeneration:
        """The worker generation that this backend writes as.

        Raises:
            InputError: there is none yet.
        """
        if self.generation is None:
            raise InputError("writing needs a worker generation", next_step="call start()")
        return self.generation

    def _take(self, base_ref: StatePath | None = None) -> WorkerGeneration:
        """Win the next number, by creating its manifest.

        Args:
            base_ref: the checkpoint that it continues from, for its next manifest.
        """
        fence = self.objects.fact(self.paths.current_generation)
        current = fence.worker_generation if isinstance(fence, CurrentGeneration) else 0
        # A start that stood still before it raised the fence may have lowered it.
        number = self._newest(current) + 1
        while True:
            manifest = GenerationManifest(
                pipeline=self._pipeline,
                job=self.paths.job,
                worker_generation=WorkerGeneration(number),
                base_ref=None,
                latest_ref=None,
                updated_at_micros=self.clock(),
            )
            path = self.paths.generation_manifest(manifest.worker_generation)
            if self.store.create(path, encode(manifest)):
                break
            number += 1
        self.generation = manifest.worker_generation
        self._manifest = replace(manifest, base_ref=base_ref)
        return self.generation

    @property
    def _own_manifest(self) -> GenerationManifest:
        """The manifest of this generation. It names its base, and what it published last."""
        if self._manifest is None:
            raise InputError("publish needs a started worker generation", next_step="call start()")
        return self._manifest

    def _put_manifest(self, manifest: GenerationManifest) -> None:
        self._manifest = manifest
        self.store.put(self.paths.generation_manifest(self._taken), encode(manifest))

    def _resolve(self) -> recovery.Restore | recovery.StartEmpty | recovery.CannotStart:
        """Choose what this generation continues from; claim that epoch if nobody has.

        Raises:
            ConflictError: a newer generation was started meanwhile.
        """
        now = self.clock()
        facts: dict[StatePath, recovery.MetadataRecord | None] = {}
        while True:
            decision = recovery.resolve_with(
                self.objects.fact, self.paths, self._taken, facts, now_micros=now
            )
            if not isinstance(decision, recovery.Claim):
                return decision
            check_own(
                self.paths,
                f"the epoch to continue from, {decision.record.epoch},",
                [decision.record.checkpoint_ref],
                next_step="run the job under the name that its metadata contains; a copy keeps "
                "that name below a URL of its own. Nothing was published",
            )
            # A newer run may have claimed this epoch long ago, and let it expire since.
            self.check_fence()
            create_once(self.store, decision.record_path, encode(decision.record))
            del facts[decision.record_path]

    # ---- the fence -------------------------------------------------------------------------------

    def check_fence(self) -> None:
        """Check that this worker generation is still the newest, and raise the fence to it if it is
        lower.
        """
        generation = self._taken
        verdict = self.objects.answer(
            lambda facts: recovery.fence_verdict(self.paths, generation, facts)
        )
        if isinstance(verdict, recovery.Fenced):
            raise self._fenced(verdict.newer)
        if isinstance(verdict, recovery.RaiseFence):
            raised = self._raise_fence(generation)
            if raised != generation:
                raise self._fenced(raised)

    def _fenced(self, newer: WorkerGeneration) -> ConflictError:
        return ConflictError(
            f"worker generation {self._taken} is fenced: generation {newer} was started after it",
            job=self.paths.job,
            url=self.store.url,
            next_step="let the newer run go on, and stop this one; nothing was lost or deleted",
        )

    def _raise_fence(self, number: WorkerGeneration) -> WorkerGeneration:
        """Write the fence, and return the generation that it names then.

        If this process stood still since it read the fence, the write has lowered it. The newest
        generation then gets it back; gc may have deleted the manifests of those in between.
        """
        while True:
            fence = CurrentGeneration(
                pipeline=self._pipeline,
                job=self.paths.job,
                worker_generation=number,
                generation_manifest_ref=self.paths.generation_manifest(number),
                updated_at_micros=self.clock(),
            )
            self.store.put(self.paths.current_generation, encode(fence))
            newest = self._newest(number)
            if newest == number:
                return number
            number = newest

    def _newest(self, known: int) -> WorkerGeneration:
        """Return the newest generation that has a manifest, at least `known`."""
        try:
            numbers = [number for number in self.generation_dirs() if number > known]
        except NotFoundError:  # the first start: the root directory does not exist yet
            return WorkerGeneration(known)
        manifests = [self.paths.generation_manifest(number) for number in numbers]
        heads = concurrently(self.store.head, manifests)
        pairs = zip(numbers, heads, strict=True)
        existing = (number for number, info in pairs if info is not None)
        return max(existing, default=WorkerGeneration(known))


def create_once(store: ObjectStore, path: StatePath, data: bytes) -> None:
    """Create an object; one with the same bytes counts as created (an answer got lost)."""
    # Refuse an object that is too large before an epoch exists that cannot be read.
    check_size(store.url, path, len(data))
    if store.create(path, data):
        return
    if parse_epoch_record(path.name) is not None:
        return  # a lost claim is not an error: the winner's record is read next
    if store.read(path) != data:
        raise ConflictError(
            "another object exists at the path of this epoch's manifest",
            path=path,
            next_step="start the job again: the next worker generation has a directory of its "
            "own; nothing was deleted",
        )
