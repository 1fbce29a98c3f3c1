"""The worker generation that a process writes as: taken, fenced, kept in its manifest.

Source: crates/arroyo-state-protocol/src/{store,workflow}.rs.
"""

from __future__ import annotations

from dataclasses import replace

from arroyo_dagster.errors import ConflictError, InputError, NotFoundError
from arroyo_dagster.state.codec.derived import encode
from arroyo_dagster.state.metadata.lease import Leased
from arroyo_dagster.state.metadata.reader import BackendReader
from arroyo_dagster.state.model.checkpoints import CurrentGeneration, GenerationManifest, Manifest
from arroyo_dagster.state.model.clock import Clock
from arroyo_dagster.state.model.ids import PipelineId, StatePath, WorkerGeneration
from arroyo_dagster.state.model.layout import Layout, parse_epoch_record
from arroyo_dagster.state.planning.restore import recovery
from arroyo_dagster.state.planning.restore.copied_jobs import check_own
from arroyo_dagster.state.storage.concurrency import concurrently
from arroyo_dagster.state.storage.store import ObjectStore, check_size


class GenerationWriter:
    """Writes as one worker generation of a job.

    Args:
        reader: reads the job's metadata; its store is the one that is written to.
        number: the worker generation; None before one is taken, and in the legacy layout.
        clock: microseconds since the Unix epoch.
    """

    def __init__(
        self, reader: BackendReader, number: WorkerGeneration | None, clock: Clock
    ) -> None:
        self.number = number
        self._reader = reader
        self._clock = clock
        self._manifest: GenerationManifest | None = None

    @property
    def pipeline(self) -> PipelineId:
        """The pipeline of the job, which every job of the protocol layout has."""
        assert self._reader.paths.pipeline is not None
        return self._reader.paths.pipeline

    @property
    def taken(self) -> WorkerGeneration:
        """The number.

        Raises:
            InputError: there is none yet.
        """
        if self.number is None:
            raise InputError("writing needs a worker generation", next_step="call start()")
        return self.number

    def take(self, base_ref: StatePath | None = None) -> WorkerGeneration:
        """Win the next number, by creating its manifest.

        Args:
            base_ref: the checkpoint that it continues from, for its next manifest.
        """
        reader = self._reader
        fence = reader.objects.fact(reader.paths.current_generation)
        current = fence.worker_generation if isinstance(fence, CurrentGeneration) else 0
        # A start that stood still before it raised the fence may have lowered it.
        number = self._newest(current) + 1
        while True:
            manifest = GenerationManifest(
                pipeline=self.pipeline,
                job=reader.paths.job,
                worker_generation=WorkerGeneration(number),
                base_ref=None,
                latest_ref=None,
                updated_at_micros=self._clock(),
            )
            path = reader.paths.generation_manifest(manifest.worker_generation)
            if reader.store.create(path, encode(manifest)):
                break
            number += 1
        self.number = manifest.worker_generation
        self._manifest = replace(manifest, base_ref=base_ref)
        return self.number

    def continue_from(self, base_ref: StatePath) -> None:
        """Let the manifest name the checkpoint that this generation continues from."""
        self._put(replace(self._own_manifest, base_ref=base_ref))

    def publish(self, latest_ref: StatePath) -> None:
        """Let the manifest name the checkpoint that this generation published last."""
        self._put(replace(self._own_manifest, latest_ref=latest_ref))

    @property
    def _own_manifest(self) -> GenerationManifest:
        assert self._manifest is not None
        return self._manifest

    def _put(self, manifest: GenerationManifest) -> None:
        self._manifest = manifest
        path = self._reader.paths.generation_manifest(manifest.worker_generation)
        self._reader.store.put(path, encode(manifest))

    def check_manifest(self, manifest: Manifest) -> None:
        """Refuse the manifest of an epoch that this generation may not publish.

        Raises:
            InputError: it is of another job or generation, or none was taken.
        """
        expected = (self.pipeline, self._reader.paths.job, self.taken)
        if (manifest.pipeline, manifest.job, manifest.worker_generation) != expected:
            raise InputError(
                "the manifest is of another job or worker generation", job=manifest.job
            )
        if self._manifest is None:
            raise InputError("publish needs a started worker generation", next_step="call start()")

    def check_fence(self) -> None:
        """Check that this worker generation is still the newest, and raise the fence to it if it is
        lower.

        Raises:
            ConflictError: a newer generation was started; in the legacy layout: the lease is lost.
                Nothing was deleted.
        """
        reader = self._reader
        if reader.paths.layout is Layout.LEGACY:
            self.sole_writer().check()
            return
        generation = self.taken
        verdict = reader.objects.answer(
            lambda facts: recovery.fence_verdict(reader.paths, generation, facts)
        )
        if isinstance(verdict, recovery.Fenced):
            raise self._fenced(verdict.newer)
        if isinstance(verdict, recovery.RaiseFence):
            raised = self._raise_fence(generation)
            if raised != generation:
                raise self._fenced(raised)

    def _fenced(self, newer: WorkerGeneration) -> ConflictError:
        return ConflictError(
            f"worker generation {self.taken} is fenced: generation {newer} was started after it",
            job=self._reader.paths.job,
            url=self._reader.store.url,
            next_step="let the newer run go on, and stop this one; nothing was lost or deleted",
        )

    def _raise_fence(self, number: WorkerGeneration) -> WorkerGeneration:
        """Write the fence, and return the generation that it names then.

        If this process stood still since it read the fence, the write has lowered it. The newest
        generation then gets it back; gc may have deleted the manifests of those in between.
        """
        paths = self._reader.paths
        while True:
            fence = CurrentGeneration(
                pipeline=self.pipeline,
                job=paths.job,
                worker_generation=number,
                generation_manifest_ref=paths.generation_manifest(number),
                updated_at_micros=self._clock(),
            )
            data = encode(fence)
            self._reader.store.put(paths.current_generation, data)
            newest = self._newest(number)
            if newest == number:
                return number
            number = newest

    def _newest(self, known: int) -> WorkerGeneration:
        """Return the newest generation that has a manifest, at least `known`."""
        reader = self._reader
        try:
            numbers = [number for number in reader.generation_dirs() if number > known]
        except NotFoundError:  # the first start: the root directory does not exist yet
            return WorkerGeneration(known)
        manifests = [reader.paths.generation_manifest(number) for number in numbers]
        heads = concurrently(reader.store.head, manifests)
        pairs = zip(numbers, heads, strict=True)
        existing = (number for number, info in pairs if info is not None)
        return max(existing, default=WorkerGeneration(known))

    def sole_writer(self) -> Leased:
        """The store, which holds the lease of the job's only writer.

        Raises:
            InputError: no such lease is held.
        """
        store, paths = self._reader.store, self._reader.paths
        if not isinstance(store, Leased) or store.lease.path.parent != paths.writers:
            raise InputError(
                "worker generations exist in the protocol layout only; in the legacy layout a "
                "writer needs the lease on the job",
                job=paths.job,
                next_step="open the backend on `lease(store, paths, owner, "
                "LeaseOptions(directory=paths.writers))`, or use the protocol layout",
            )
        return store

    def resolve(self) -> recovery.Restore | recovery.StartEmpty | recovery.CannotStart:
        """Choose what this generation continues from; claim that epoch if nobody has.

        Raises:
            ConflictError: a newer generation was started meanwhile.
        """
        reader, now = self._reader, self._clock()
        facts: dict[StatePath, recovery.MetadataRecord | None] = {}
        while True:
            decision = recovery.resolve_with(
                reader.objects.fact, reader.paths, self.taken, facts, now_micros=now
            )
            if not isinstance(decision, recovery.Claim):
                return decision
            check_own(
                reader.paths,
                f"the epoch to continue from, {decision.record.epoch},",
                [decision.record.checkpoint_ref],
                next_step="run the job under the name that its metadata contains; a copy keeps "
                "that name below a URL of its own. Nothing was published",
            )
            # A newer run may have claimed this epoch long ago, and let it expire since.
            self.check_fence()
            create_once(reader.store, decision.record_path, encode(decision.record))
            del facts[decision.record_path]


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
