"""A model of Arroyo as a writer: starts, publishes, claims, commits and cleans up, in both layouts.

Written from the storage specification, step by step; it shares the codec with the product, and no
rule. What its database and its API would say is kept in `Controller`.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field, replace
from typing import Any

import pyarrow as pa

from arroyo_dagster.errors import FormatError, NotFoundError, StorageError
from arroyo_dagster.state import (
    Epoch,
    JobPaths,
    OperatorCheckpoint,
    OperatorId,
    StatePath,
    TableConfig,
    TableName,
    WorkerGeneration,
    range_for_server,
    timestamp_table_config,
)
from tests.explorer.rows import KEYS, STEP, encoded, numbers_of, row
from tests.explorer.world import Hands, Process, Violation, World, refused
from tests.formats import (
    CheckpointFacts,
    ExpiringTimeKeyConfig,
    ExpiringTimeKeyFiles,
    GlobalKeyedConfig,
    GlobalKeyedFiles,
    JobCondition,
    JobFacts,
    LegacyCheckpoint,
    Manifest,
    SourceAnswer,
    TimeFile,
    metadata,
)

OPERATORS = (OperatorId("source_s_0"), OperatorId("SessionWindow<30s>"))
GLOBAL, TIMED = TableName("g"), TableName("t")
_TIME = pa.field("_timestamp", pa.timestamp("ns"), nullable=False)
_STORED = timestamp_table_config(
    "t", retention_micros=1, schema=pa.schema([("key", pa.string()), _TIME]), keys=["key"]
).config
assert isinstance(_STORED, ExpiringTimeKeyConfig)


@dataclass
class Controller:
    """What Arroyo's controller knows of a job.

    Attributes:
        rows: the `checkpoints` table of its database: epoch to state (legacy layout).
        keep, every: how many epochs its own cleanup leaves, and how often it runs.
        retention: of the expiring table, in epochs.
        afresh: the first epoch of the last run that ignored the state, of which Arroyo keeps that
            epochs before it are ignored (crates/arroyo-controller/src/states/scheduling.rs).
        written_late: whether a run has written an epoch after another run was started, maybe over
            that run's (legacy layout).
    """

    paths: JobPaths
    keep: int = 4
    every: int = 2
    two_phase: bool = False
    parallelism: int = 1
    retention: int = 3
    condition: JobCondition = JobCondition.STOPPED
    run_id: int = 0
    rows: dict[int, str] = field(default_factory=dict)
    min_epoch: int = 0
    afresh: int = 0
    written_late: bool = False
    source: str = "the model"

    def copied(self) -> Controller:
        return replace(self, rows=dict(self.rows))

    @property
    def newest(self) -> int | None:
        return max((e for e, s in self.rows.items() if s in ("ready", "committing")), default=None)

    @property
    def gives_again(self) -> bool:
        """Whether its next cleaning up takes names that a run which ignored the state gave again.

        The first one after such a run reads what the epoch before it listed under these names.
        """
        return self.min_epoch < self.afresh

    def look_up(self, jobs: Any, *, checkpoints: bool = False) -> list[SourceAnswer]:
        """Answer as the REST API does."""
        legacy = self.paths.pipeline is None
        ready = [e for e, s in sorted(self.rows.items()) if s == "ready"]
        known = tuple(CheckpointFacts(epoch=Epoch(e), ready=True, state="ready") for e in ready)
        facts = JobFacts(
            job=self.paths.job,
            source=self.source,
            condition=self.condition,
            state=self.condition.value,
            run_id=self.run_id,
            checkpoints=known if legacy else (),
            newest_ready_epoch=Epoch(ready[-1]) if legacy and ready else None,
        )
        return [SourceAnswer(source=self.source, facts=facts) for _ in jobs]

    def configs(self) -> dict[TableName, TableConfig]:
        keyed = GlobalKeyedConfig(table=GLOBAL, uses_two_phase_commit=self.two_phase)
        timed = ExpiringTimeKeyConfig(
            table=TIMED,
            retention_micros=self.retention * STEP,
            schema=_STORED.schema,
            description="tumbling_intermediate",
        )
        return {GLOBAL: TableConfig(config=keyed), TIMED: TableConfig(config=timed)}


class Failed(Exception):
    """The job fails over, as Arroyo's would."""


def write_files(
    hands: Hands,
    job: Controller,
    epoch: int,
    directory: int,
    generation: int | None,
    before: dict[OperatorId, OperatorCheckpoint],
    chance: random.Random,
    parallelism: int,
) -> list[OperatorCheckpoint]:
    """What the workers do: data files of every subtask; what the coordinator merges of it.

    Args:
        directory: the number in the names, which differs from the epoch after ignore_state.
        parallelism: of the run, which somebody may set to another for the next one.
    """
    job = replace(job, parallelism=parallelism)
    return [
        _operator(hands, job, name, epoch, directory, generation, before.get(name), chance)
        for name in OPERATORS
    ]


def _operator(
    hands: Hands,
    job: Controller,
    name: OperatorId,
    epoch: int,
    directory: int,
    generation: int | None,
    before: OperatorCheckpoint | None,
    chance: random.Random,
) -> OperatorCheckpoint:
    number = None if generation is None else WorkerGeneration(generation)
    place = job.paths.operator(name, Epoch(directory), number)
    cutoff = max(0, (epoch - job.retention) * STEP)
    earlier = before.tables.get(TIMED) if before else None
    files = list(earlier.files) if isinstance(earlier, ExpiringTimeKeyFiles) else []
    files = [file for file in files if file.max_timestamp_micros >= cutoff]
    snapshots = []
    for subtask in range(job.parallelism):
        path = place / f"table-{GLOBAL}-{subtask:03}"
        keys = range_for_server(subtask, job.parallelism)
        one, *more = numbers_of(str(job.paths.root), job.run_id, epoch, keys, 1 + epoch % 2)
        hands.put(path, encoded([row(f"subtask-{subtask}", one)]))
        snapshots.append(path)
        if chance.random() < 0.7:
            path = place / f"table-{TIMED}-{subtask:03}"
            rows = [row(KEYS[(epoch + subtask) % 2], one)]
            hands.put(path, encoded([*rows, *(row(KEYS[subtask % 2], two) for two in more)]))
            files.append(
                TimeFile(
                    epoch=Epoch(directory),
                    path=path,
                    min_routing_key=keys.start,
                    max_routing_key=keys.end,
                    max_timestamp_micros=epoch * STEP,
                )
            )
    tables: dict[TableName, Any] = {GLOBAL: GlobalKeyedFiles(files=tuple(snapshots))}
    if files:
        tables[TIMED] = ExpiringTimeKeyFiles(files=tuple(files))
    configs = {table: config for table, config in job.configs().items() if table in tables}
    return OperatorCheckpoint(
        job=job.paths.job,
        operator=name,
        epoch=Epoch(epoch),
        parallelism=job.parallelism,
        min_watermark_micros=epoch * STEP,
        max_watermark_micros=epoch * STEP,
        start_time_micros=0,
        finish_time_micros=0,
        tables=tables,
        configs=configs,
    )


def _json(hands: Hands, path: str) -> dict[str, Any] | None:
    try:
        return json.loads(hands.read(StatePath(path)))  # type: ignore[no-any-return]
    except NotFoundError:
        return None


def is_cut(world: World, url: str, paths: JobPaths) -> bool:
    """Whether metadata of a job is cut: whoever knows that starts it only once it is repaired."""
    below = f"{url}{paths.root}/"
    return below in world.held or any(
        path.startswith(below) and path in world.objects and world.objects[path][0] == left
        for path, left in world.cut.items()
    )


def _encoded(fields: dict[str, Any]) -> bytes:
    return json.dumps({"version": 1, **fields}, separators=(",", ":")).encode()


# ---- the protocol layout -------------------------------------------------------------------------


@dataclass
class Leader:
    """One worker generation of a job of the protocol layout."""

    world: World
    process: Process
    job: Controller
    chance: random.Random
    number: int = 0
    head: Manifest | None = None
    head_ref: str | None = None
    base_ref: str | None = None
    latest_ref: str | None = None
    min_epoch: int = 0
    parallelism: int = 1

    def __post_init__(self) -> None:
        self.hands = Hands(self.world, self.process)
        self.paths = self.job.paths
        self.clock = self.world.clock_of(self.process)

    def work(self, epochs: int, stop: bool) -> str:
        """Start, write epochs, stop."""
        if is_cut(self.world, self.process.url, self.paths):
            return "failed: metadata is cut"
        self.job.condition = JobCondition.CHANGING
        self.job.run_id += 1
        self.number, self.parallelism = self.job.run_id, self.job.parallelism
        try:
            self.start()
            self._now(JobCondition.RUNNING)
            for _ in range(epochs):
                self.checkpoint()
        except (Failed, StorageError) as error:
            # It is scheduled again by itself: until then it reads as running.
            return f"failed: {getattr(error, 'message', error)}"
        except json.JSONDecodeError as error:
            return refused(error)
        if stop:
            self._now(JobCondition.STOPPED)
        return "done"

    def _now(self, condition: JobCondition) -> None:
        if self.job.run_id == self.number:
            self.job.condition = condition

    @property
    def _ids(self) -> dict[str, Any]:
        return {"pipeline_id": self.paths.pipeline, "job_id": self.paths.job}

    def start(self) -> None:
        """arroyo-state.md 3.3."""
        fence = _json(self.hands, self.paths.current_generation)
        if fence is not None and fence["generation"] > self.number:
            raise Failed("a newer generation was started")
        own = self.paths.generation_manifest(WorkerGeneration(self.number))
        self.hands.put(
            self.paths.current_generation,
            _encoded(
                {
                    **self._ids,
                    "generation": self.number,
                    "generation_manifest_ref": own,
                    "updated_at_micros": self.clock(),
                }
            ),
        )
        for number in range(self.number - 1, -1, -1):
            found = _json(self.hands, self.paths.generation_manifest(WorkerGeneration(number)))
            if found is not None and self._chosen(found):
                break
        self.base_ref = self.head_ref
        if self.head is not None:
            self.min_epoch = self.head.min_epoch
        self._write_generation()

    def _write_generation(self) -> None:
        self.hands.put(
            self.paths.generation_manifest(WorkerGeneration(self.number)),
            _encoded(
                {
                    **self._ids,
                    "generation": self.number,
                    "base_checkpoint_ref": self.base_ref,
                    "latest_checkpoint_ref": self.latest_ref,
                    "updated_at_micros": self.clock(),
                }
            ),
        )

    def _chosen(self, generation: dict[str, Any]) -> bool:
        refs = (generation.get("latest_checkpoint_ref"), generation.get("base_checkpoint_ref"))
        return any(self._restores(ref) for ref in dict.fromkeys(r for r in refs if r))

    def _restores(self, ref: str, *, canonical: bool = False) -> bool:
        manifest = self._manifest(ref)
        if manifest is None:
            if canonical:
                raise Failed("the canonical checkpoint is missing")
            return False
        if manifest.parent_ref is not None and self._state(manifest.parent_ref) != "ready":
            raise Failed("the parent is not ready")
        state = self._state(ref)
        if state == "unclaimed":
            if canonical:
                raise Failed("the canonical checkpoint is unclaimed")
            fence = _json(self.hands, self.paths.current_generation)
            if fence is None or fence["generation"] != self.number:
                return False
            self._claim(ref, manifest)
            state = self._state(ref)
        if state == "orphaned":
            record = _json(self.hands, self.paths.epoch_record(manifest.epoch))
            assert record is not None
            return self._restores(record["checkpoint_ref"], canonical=True)
        if state == "committing":
            self._commit(ref, manifest)
        self.head, self.head_ref = manifest, ref
        return True

    def _manifest(self, ref: str) -> Manifest | None:
        try:
            return metadata.decode_manifest(self.hands.read(StatePath(ref)), ref)
        except NotFoundError:
            return None

    def _state(self, ref: str) -> str:
        """arroyo-state.md 3.1."""
        manifest = self._manifest(ref)
        if manifest is None:
            return "invisible"
        record = _json(self.hands, self.paths.epoch_record(manifest.epoch))
        if record is None:
            return "unclaimed"
        if record["checkpoint_ref"] != ref:
            return "orphaned"
        if not manifest.needs_commit or _json(self.hands, _marker(ref)) is not None:
            return "ready"
        return "committing"

    def _claim(self, ref: str, manifest: Manifest) -> bool:
        fields = {
            **self._ids,
            "epoch": manifest.epoch,
            "generation": manifest.worker_generation,
            "parent_checkpoint_ref": manifest.parent_ref,
            "checkpoint_ref": ref,
            "created_at_micros": self.clock(),
        }
        return self.hands.create(self.paths.epoch_record(manifest.epoch), _encoded(fields))

    def _commit(self, ref: str, manifest: Manifest) -> None:
        fields = {
            **self._ids,
            "epoch": manifest.epoch,
            "checkpoint_generation": manifest.worker_generation,
            "writer_generation": self.number,
            "checkpoint_ref": ref,
        }
        self.hands.create(StatePath(_marker(ref)), _encoded(fields))

    def checkpoint(self) -> None:
        """Write an epoch and publish it: arroyo-state.md 3.2; then 9.6."""
        began = self.clock()
        epoch = 1 if self.head is None else self.head.epoch + 1
        before = {} if self.head is None else {o.operator: o for o in self.head.operators}
        operators = write_files(
            self.hands, self.job, epoch, epoch, self.number, before, self.chance, self.parallelism
        )
        assert self.paths.pipeline is not None
        manifest = Manifest(
            pipeline=self.paths.pipeline,
            job=self.paths.job,
            worker_generation=WorkerGeneration(self.number),
            epoch=Epoch(epoch),
            min_epoch=Epoch(self.min_epoch),
            start_time_micros=began,
            finish_time_micros=self.clock(),
            needs_commit=any(operator.needs_commit for operator in operators),
            operators=tuple(operators),
            parent_ref=None if self.head_ref is None else StatePath(self.head_ref),
        )
        self._publish(manifest)
        if epoch - self.job.keep - self.min_epoch >= self.job.every:
            self.min_epoch = epoch - self.job.keep
            self._clean_up(self.min_epoch)

    def _publish(self, manifest: Manifest) -> None:
        ref = self.paths.manifest(manifest.worker_generation, manifest.epoch)
        fence = _json(self.hands, self.paths.current_generation)
        if fence is None or fence["generation"] != self.number:
            raise Failed("stale generation")
        if not self.hands.create(ref, metadata.encode_manifest(manifest)):
            raise Failed("the manifest is there")
        if manifest.parent_ref is not None and self._state(manifest.parent_ref) != "ready":
            raise Failed("the parent is not ready")
        self.latest_ref = ref
        self._write_generation()
        if not self._claim(ref, manifest):
            raise Failed("orphaned")
        if manifest.needs_commit:
            self._commit(ref, manifest)
        self.head, self.head_ref = manifest, ref

    def _clean_up(self, new: int) -> None:
        """arroyo-state.md 9.6, `cleanup_leader_checkpoints`."""
        chain: list[tuple[str, Manifest]] = []
        ref = self.head_ref
        while ref is not None:
            found = self._manifest(ref)
            if found is None:
                break
            chain.append((ref, found))
            ref = found.parent_ref
        old = [(ref, one) for ref, one in chain if one.epoch < new]
        kept = {p for _, m in chain if m.epoch >= new for o in m.operators for p in o.paths}
        doomed = {p for _, m in old for o in m.operators for p in o.paths} - kept
        for path in sorted(doomed):
            self.hands.delete_many([path])
        for ref, one in old:
            self.hands.delete_many([StatePath(_marker(ref))])
            self.hands.delete_many([self.paths.epoch_record(one.epoch)])
        for ref, _ in reversed(old):
            self.hands.delete_many([StatePath(ref)])


def _marker(ref: str) -> str:
    return ref.rpartition("/")[0] + "/committed.json"


# ---- the legacy layout ---------------------------------------------------------------------------


@dataclass
class LegacyRun:
    """One run of a job of the legacy layout: controller and workers."""

    world: World
    process: Process
    job: Controller
    chance: random.Random
    parallelism: int = 1
    number: int = 0

    def work(self, epochs: int, stop: bool, ignore_state: bool = False) -> str:
        """Start, write epochs, stop."""
        job, hands = self.job, Hands(self.world, self.process)
        if is_cut(self.world, self.process.url, job.paths):
            return "failed: metadata is cut"
        job.condition = JobCondition.CHANGING
        job.run_id += 1
        number, self.parallelism = job.run_id, job.parallelism
        self.number = number
        self.world.started(self.process)
        if ignore_state:
            self.world.wait_for_requests(self.process)
        try:
            epoch, before, directory = self._restore(hands, number, ignore_state)
            if job.run_id == number:
                job.condition = JobCondition.RUNNING
            for _ in range(epochs):
                if job.run_id != number:
                    return "another run was started"
                epoch, directory = epoch + 1, directory + 1
                before = self._checkpoint(hands, epoch, directory, before)
        except StorageError as error:
            return f"failed: {error.message}"
        if stop and job.run_id == number:
            job.condition = JobCondition.STOPPED
        return "done"

    def _restore(
        self, hands: Hands, number: int, ignore_state: bool
    ) -> tuple[int, dict[OperatorId, OperatorCheckpoint], int]:
        job = self.job
        if ignore_state:
            threshold = max(job.rows, default=0) + 1
            job.rows = dict.fromkeys(job.rows, "failed")
            job.min_epoch, job.afresh = threshold - 1, threshold
            return threshold - 1, {}, 0
        newest = job.newest
        if newest is None:  # the threshold stays in the job's configuration
            return max(job.afresh - 1, 0), {}, 0
        path = job.paths.legacy_metadata(Epoch(newest))
        try:
            head = metadata.decode_legacy_checkpoint(hands.read(path), path)
            found = [self._loaded(hands, name, newest) for name in OPERATORS]
        except NotFoundError as error:
            if self.process.url + str(error.facts["path"]) in self.world.lost:
                raise StorageError("metadata is lost", path=path) from error
            raise Violation(f"epoch {newest} cannot be restored: {error.facts}") from error
        except FormatError as error:  # an undo has put back what was cut since this run began
            if not is_cut(self.world, self.process.url, job.paths):
                raise
            raise StorageError("metadata is cut", path=path) from error
        hands.put(
            path, metadata.encode_legacy_checkpoint(replace(head, min_epoch=Epoch(job.min_epoch)))
        )
        if job.run_id == number:  # else the controller has begun another run since
            job.rows |= {later: "failed" for later in job.rows if later > newest}
        own = max((o.epoch for o in found), default=Epoch(newest))
        return newest, {o.operator: o for o in found}, int(own)

    def _loaded(self, hands: Hands, name: OperatorId, epoch: int) -> OperatorCheckpoint:
        path = self.job.paths.operator_metadata(name, Epoch(epoch))
        return metadata.decode_operator(hands.read(path), path)

    def _checkpoint(
        self, hands: Hands, epoch: int, directory: int, before: dict[OperatorId, OperatorCheckpoint]
    ) -> dict[OperatorId, OperatorCheckpoint]:
        job, clock = self.job, self.world.clock_of(self.process)
        began = clock()
        operators = write_files(
            hands, job, epoch, directory, None, before, self.chance, self.parallelism
        )
        for one in operators:
            path = job.paths.operator_metadata(one.operator, Epoch(epoch))
            hands.put(path, metadata.encode_operator(one))
        head = LegacyCheckpoint(
            job=job.paths.job,
            epoch=Epoch(epoch),
            min_epoch=Epoch(job.min_epoch),
            start_time_micros=began,
            finish_time_micros=clock(),
            operators=OPERATORS,
        )
        path = job.paths.legacy_metadata(Epoch(epoch))
        hands.put(path, metadata.encode_legacy_checkpoint(head))
        job.written_late |= job.run_id != self.number
        job.rows[epoch] = "ready"
        if epoch - job.min_epoch > job.keep and epoch % job.every == 0:
            self._clean_up(hands, epoch)
        return {one.operator: one for one in operators}

    def _clean_up(self, hands: Hands, epoch: int) -> None:
        """arroyo-state.md 9.6, `cleanup_checkpoint`."""
        job = self.job
        old, new = max(job.min_epoch, 1), epoch - job.keep
        head_path = job.paths.legacy_metadata(Epoch(epoch))
        head = metadata.decode_legacy_checkpoint(hands.read(head_path), head_path)
        for name in OPERATORS:
            try:
                kept = set(self._loaded(hands, name, new).paths)
            except NotFoundError as error:
                # Unless it was another run of the same job, which the model lets go on for a while.
                missing = str(job.paths.operator_metadata(name, Epoch(new)))
                if new in job.rows and self.process.url + missing not in self.world.taken_by_arroyo:
                    raise Violation(
                        f"the job never checkpoints again: no {name} at {new}"
                    ) from error
                return
            for number in range(old, new):
                try:
                    found = self._loaded(hands, name, number)
                except NotFoundError:
                    continue
                for path in found.paths:
                    if path not in kept:
                        hands.delete_many([path])
            for number in range(old, new):
                hands.delete_many([job.paths.operator_metadata(name, Epoch(number))])
        for number in range(old, new):
            hands.delete_many([job.paths.legacy_metadata(Epoch(number))])
        hands.put(head_path, metadata.encode_legacy_checkpoint(replace(head, min_epoch=Epoch(new))))
        for number in [e for e in job.rows if e < new]:
            job.rows[number] = "compacted"
        job.min_epoch = new
