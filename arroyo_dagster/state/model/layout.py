"""Every object path, in both layouts: built here, parsed here, nowhere else.

Source: crates/arroyo-state-protocol/src/lib.rs, `ProtocolPaths`;
crates/arroyo-state/src/parquet.rs, `metadata_path`, `operator_path`.
"""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass
from functools import cached_property

from arroyo_dagster.state.model.ids import (
    OUR_DIRECTORY,
    Epoch,
    JobId,
    OperatorId,
    PipelineId,
    StatePath,
    TableName,
    WorkerGeneration,
)
from arroyo_dagster.state.model.numbers import number_pattern, parse_number

CURRENT_GENERATION = "current-generation.json"
GENERATION_MANIFEST = "generation-manifest.json"
CHECKPOINT_MANIFEST = "checkpoint-manifest.pb"
COMMITTED_MARKER = "committed.json"
QUARANTINE_INDEX = "index.json"
MAINTENANCE_NAMES = frozenset(
    {
        *("stop-request.json", "retained.json", "compactions", "leases", "writers", "commits"),
        *("journal", "quarantine", "removal.json"),
        *("topics", "stdin", "landed", "spark", "spark-sinks"),
        *("rewrites", "window.json", "windows"),
    }
)
"""What lies in the directory of a job that is ours alone."""

REMOVED = "-removed"
"""Ends the name of a file of removed keys of a global keyed table."""

COMPACTED = "-compacted"
"""Ends the name of a merged data file."""

_REWRITTEN = "-ext-"
"""Part of the name of a data file that this package wrote into an Arroyo job; Arroyo's own names
never contain it.
"""

CHECKPOINT_DIR = rf"checkpoint-({number_pattern(7)})"
EPOCH_RECORD = rf"epoch-({number_pattern(7)})\.record"
"""Names as regular expressions; the group is the number."""

STAGING = "_staging"
"""The directory of what a sink has prepared for an epoch, until the epoch commits it."""

_STAGED = re.compile(rf"({number_pattern(7)})-{number_pattern(3)}-[0-9a-f]{{16}}\.[a-z]+")
_LEVEL = re.compile(rf"-l({number_pattern()}){COMPACTED}\Z")
_REWRITTEN_NAME = re.compile(rf"-{number_pattern(3)}{_REWRITTEN}[0-9a-f]{{16,}}\Z")
_CHECKPOINT = re.compile(CHECKPOINT_DIR)
_EPOCH_RECORD = re.compile(EPOCH_RECORD)
_BELOW_A_JOB = frozenset({OUR_DIRECTORY, "generations", "epochs", "checkpoints"})


class Layout(enum.Enum):
    """How the objects around the data files are arranged."""

    LEGACY = "legacy"
    PROTOCOL = "protocol"


@dataclass(frozen=True, order=True)
class JobPaths:
    """The objects of one job. `pipeline` is None in the legacy layout.

    Fixed paths are put together once: collectors ask for them with every object they meet.
    """

    job: JobId
    pipeline: PipelineId | None = None

    @cached_property
    def layout(self) -> Layout:
        """Which of the two layouts: of a job with a pipeline the protocol one."""
        return Layout.LEGACY if self.pipeline is None else Layout.PROTOCOL

    @cached_property
    def root(self) -> StatePath:
        """The job's own directory: `{job}`, or `{pipeline}/{job}`."""
        return StatePath(self.job if self.pipeline is None else f"{self.pipeline}/{self.job}")

    def contains(self, path: str) -> bool:
        """Whether an object lies below the job's own directory."""
        return path.startswith(f"{self.root}/")

    def __hash__(self) -> int:
        return hash(self.root)

    # ---- ours, in both layouts -------------------------------------------------------------------

    @cached_property
    def maintenance(self) -> StatePath:
        """The directory of what is ours alone; Arroyo never looks there."""
        return self.root / OUR_DIRECTORY

    @cached_property
    def stop_request(self) -> StatePath:
        """Written by whoever wants the job to stop with a checkpoint, removed by the job."""
        return self.maintenance / "stop-request.json"

    @cached_property
    def compactions(self) -> StatePath:
        """Compaction records that wait for the job's writer."""
        return self.maintenance / "compactions"

    def topic(self, topic: str) -> StatePath:
        """Records that an SDF service puts out for other services of its dataflow."""
        return self.maintenance / "topics" / topic

    def stdin(self, topic: str) -> StatePath:
        """Lines of a pipe that an SDF service keeps until their epoch is ready."""
        return self.maintenance / "stdin" / topic

    def spark_sink(self, topic: str) -> StatePath:
        """Records that a sink of Spark's has staged, until their epoch is ready."""
        return self.maintenance / "spark-sinks" / topic

    @cached_property
    def leases(self) -> StatePath:
        """Who maintains the job: one object a lease, the highest number counts."""
        return self.maintenance / "leases"

    @cached_property
    def writers(self) -> StatePath:
        """Who runs the job in the legacy layout, which has no worker generations: as `leases`."""
        return self.maintenance / "writers"

    @cached_property
    def job_pins(self) -> StatePath:
        """What stays besides the newest epochs: pins, and what lies in quarantine."""
        return self.maintenance / "retained.json"

    @cached_property
    def journal(self) -> StatePath:
        """What was deleted, when, by whom, under which plan: a directory a run."""
        return self.maintenance / "journal"

    @cached_property
    def removal(self) -> StatePath:
        """The plan by which a dead job is being removed, as long as that is not finished."""
        return self.maintenance / "removal.json"

    @cached_property
    def quarantine(self) -> StatePath:
        """What was moved aside instead of deleted: a directory a run."""
        return self.maintenance / "quarantine"

    def quarantine_index(self, name: str) -> StatePath:
        """What lies in one quarantine, and what its epochs need besides."""
        return self.quarantine / name / QUARANTINE_INDEX

    @cached_property
    def rewrites(self) -> StatePath:
        """What a job of Arroyo's had in its metadata before we rewrote it: to put it back."""
        return self.maintenance / "rewrites"

    @cached_property
    def window(self) -> StatePath:
        """A maintenance window that is open: whoever finds it alone must start the job again."""
        return self.maintenance / "window.json"

    @cached_property
    def windows(self) -> StatePath:
        """Who holds the maintenance window of the job: as `leases`."""
        return self.maintenance / "windows"

    def commit_note(self, epoch: Epoch) -> StatePath:
        """Legacy layout: both phases of the commit are done. Arroyo keeps that in its database."""
        return self.maintenance / "commits" / f"epoch-{epoch:07}.json"

    # ---- protocol --------------------------------------------------------------------------------

    @cached_property
    def current_generation(self) -> StatePath:
        """The fence: which worker generation may write."""
        return self.root / CURRENT_GENERATION

    @cached_property
    def generations(self) -> StatePath:
        """The directory of all worker generations."""
        return self.root / "generations"

    @cached_property
    def epochs(self) -> StatePath:
        """The directory of the epoch records."""
        return self.root / "epochs"

    def generation(self, generation: WorkerGeneration) -> StatePath:
        """The directory of one worker generation; its number is not padded."""
        return self.generations / str(generation)

    def generation_manifest(self, generation: WorkerGeneration) -> StatePath:
        """What one worker generation started from, and wrote last."""
        return StatePath(f"{self.root}/generations/{generation}/{GENERATION_MANIFEST}")

    def epoch_record(self, epoch: Epoch) -> StatePath:
        """The record that says which checkpoint owns an epoch."""
        return StatePath(f"{self.root}/epochs/epoch-{epoch:07}.record")

    def manifest(self, generation: WorkerGeneration, epoch: Epoch) -> StatePath:
        """The manifest of an epoch that a worker generation wrote."""
        return self._in_checkpoint(epoch, generation, CHECKPOINT_MANIFEST)

    def committed(self, generation: WorkerGeneration, epoch: Epoch) -> StatePath:
        """The marker of a commit that is done."""
        return self._in_checkpoint(epoch, generation, COMMITTED_MARKER)

    # ---- both ------------------------------------------------------------------------------------

    def checkpoints(self, generation: WorkerGeneration | None = None) -> StatePath:
        """The directory of checkpoints; None = of the legacy layout."""
        base = self.root if generation is None else self.generation(generation)
        return base / "checkpoints"

    def checkpoint(self, epoch: Epoch, generation: WorkerGeneration | None = None) -> StatePath:
        """The directory of one epoch, its number padded to 7 digits or more."""
        return StatePath(self._checkpoint(epoch, generation))

    def _checkpoint(self, epoch: Epoch, generation: WorkerGeneration | None) -> str:
        base = self.root if generation is None else f"{self.root}/generations/{generation}"
        return f"{base}/checkpoints/checkpoint-{epoch:07}"

    def _in_checkpoint(
        self, epoch: Epoch, generation: WorkerGeneration | None, name: str
    ) -> StatePath:
        return StatePath(f"{self._checkpoint(epoch, generation)}/{name}")

    def operator(
        self, operator: OperatorId, epoch: Epoch, generation: WorkerGeneration | None = None
    ) -> StatePath:
        """The directory of one operator at one epoch."""
        return self._in_checkpoint(epoch, generation, f"operator-{operator}")

    def data_file(
        self,
        operator: OperatorId,
        table: TableName,
        subtask: int,
        epoch: Epoch,
        generation: WorkerGeneration | None = None,
        *,
        attempt: str,
    ) -> StatePath:
        """A data file of ours: `attempt` makes the name unique, so that no retry overwrites."""
        name = f"operator-{operator}/table-{table}-{subtask:03}-{attempt}"
        return self._in_checkpoint(epoch, generation, name)

    def subtask_metadata(
        self,
        operator: OperatorId,
        subtask: int,
        epoch: Epoch,
        generation: WorkerGeneration | None = None,
    ) -> StatePath:
        """The durable "this subtask is done" of one epoch; ours, ignored by Arroyo."""
        return self._in_checkpoint(epoch, generation, f"operator-{operator}-{subtask}.metadata")

    def operator_metadata(
        self, operator: OperatorId, epoch: Epoch, generation: WorkerGeneration | None = None
    ) -> StatePath:
        """The merged metadata of one operator at one epoch."""
        return self._in_checkpoint(epoch, generation, operator_metadata_name(operator))

    def legacy_metadata(self, epoch: Epoch) -> StatePath:
        """The object that makes an epoch exist in the legacy layout."""
        return self._in_checkpoint(epoch, None, "metadata")


def operator_metadata_name(operator: str) -> str:
    """The name of an operator's merged metadata, below the directory of its epoch."""
    return f"operator-{operator}/metadata"


def probe_path(beside: str, unique: str) -> StatePath:
    """A fresh name in the job that an object belongs to, or below the URL's root without a job.

    It lies among the leases, where every release counts it as ours and none takes it for a lease.
    """
    segments = beside.split("/")
    depth = next((at for at in (2, 1) if at < len(segments) and segments[at] in _BELOW_A_JOB), 0)
    return StatePath("/".join((*segments[:depth], OUR_DIRECTORY, "leases", f"probe-{unique}")))


def rewritten_attempt(unique: str) -> str:
    """The attempt in the name of a data file that we write into a job of Arroyo's.

    Neither a subtask of Arroyo's (`table-t-000`) nor its compaction (`…-compacted`) ever writes
    such a name, and `unique` keeps our own attempts apart.
    """
    return f"{_REWRITTEN.removeprefix('-')}{unique}"


def is_rewritten(path: str) -> bool:
    """Whether we wrote a data file into a job of Arroyo's."""
    return _REWRITTEN_NAME.search(path) is not None


def is_compacted(path: str) -> bool:
    """Whether a data file of ours was merged of others."""
    return path.endswith(COMPACTED)


def compacted(level: int) -> str:
    """Ends the name of a data file that was merged `level` times, at least once."""
    return COMPACTED if level == 1 else f"-l{level}{COMPACTED}"


def compaction_level(path: str) -> int:
    """How often a data file of ours was merged, by its name; 0 = as a subtask wrote it."""
    if not is_compacted(path):
        return 0
    found = _LEVEL.search(path)
    return max(1, int(found[1])) if found else 1


def parse_epoch_record(name: str) -> Epoch | None:
    """The epoch in the name of an epoch record; None for any other name."""
    found = _EPOCH_RECORD.fullmatch(name)
    return Epoch(int(found[1])) if found else None


def parse_checkpoint_dir(name: str) -> Epoch | None:
    """The number in the name of a checkpoint directory (which need not be its files' epoch)."""
    found = _CHECKPOINT.fullmatch(name)
    return Epoch(int(found[1])) if found else None


def staged_name(epoch: Epoch, subtask: int, unique: str, suffix: str) -> str:
    """The name of a file that a subtask of a sink stages for an epoch."""
    return f"{epoch:07}-{subtask:03}-{unique}{suffix}"


def parse_staged_name(name: str) -> Epoch | None:
    """The epoch in the name of a file that a sink has staged; None for any other name."""
    found = _STAGED.fullmatch(name)
    return Epoch(int(found[1])) if found else None


@dataclass(frozen=True, slots=True)
class ManifestAddress:
    """What the path of a manifest says of it."""

    paths: JobPaths
    worker_generation: WorkerGeneration
    epoch: Epoch


def parse_manifest_path(path: str) -> ManifestAddress | None:
    """Take the path of a `checkpoint-manifest.pb` apart; None if it is not one."""
    segments = path.split("/")
    if len(segments) != 7 or segments[2] != "generations" or segments[4] != "checkpoints":
        return None
    epoch, generation = parse_checkpoint_dir(segments[5]), parse_number(segments[3])
    if epoch is None or generation is None or segments[6] != CHECKPOINT_MANIFEST:
        return None
    return ManifestAddress(
        JobPaths(JobId(segments[1]), PipelineId(segments[0])),
        WorkerGeneration(generation),
        epoch,
    )


def parse_data_file(path: str, table: str) -> int | None:
    """The subtask in the name of a data file that it wrote; None for merged and other files."""
    name = path.rpartition("/")[2]
    pattern = rf"table-{re.escape(table)}-({number_pattern(3)})(-.*)?"
    found = re.fullmatch(pattern, name, re.DOTALL)
    return int(found[1]) if found and not is_compacted(name) else None
