"""Every object path in both layouts: the only module that builds and parses paths.

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
        *("changes", "window.json", "windows", "copy.json"),
    }
)
"""The names in the directory of a job that only this package writes."""

PROBE = "probe-"
"""The prefix of the name of an object that proves what a store does."""

REMOVED = "-removed"
"""The suffix of a file of removed keys of a global keyed table."""

COMPACTED = "-compacted"
"""The suffix of a merged data file."""

_REWRITTEN = "-ext-"
"""Part of the name of a data file that this package wrote into an Arroyo job; Arroyo's own names
never contain it.
"""

CHECKPOINT_DIR = rf"checkpoint-({number_pattern(7)})"
EPOCH_RECORD = rf"epoch-({number_pattern(7)})\.record"
"""Names as regular expressions; the group is the number."""

STAGING = "_staging"
"""The directory of the files that a sink stages for an epoch, until the epoch commits them."""

_STAGED = re.compile(rf"({number_pattern(7)})-({number_pattern(3)})-[0-9a-f]{{16}}\.[a-z]+")
_LEVEL = re.compile(rf"-l({number_pattern()}){COMPACTED}\Z")
_REWRITTEN_NAME = re.compile(rf"-{number_pattern(3)}{_REWRITTEN}[0-9a-f]{{16,}}\Z")
_CHECKPOINT = re.compile(CHECKPOINT_DIR)
_IN_CHECKPOINT = re.compile(
    rf"(?:generations/({number_pattern()})/)?checkpoints/{CHECKPOINT_DIR}/"
    r"(?:operator-(.+)/metadata|.+)",
    re.DOTALL,
)
_GENERATION = re.compile(rf"generations/({number_pattern()})/{re.escape(GENERATION_MANIFEST)}")
_RECORD = re.compile(rf"epochs/{EPOCH_RECORD}")
_TABLE_FILE = re.compile(
    rf"table-(.+?)-{number_pattern(3)}(-[0-9a-f]{{8,}})?"
    rf"(?:{REMOVED}|(?:-l{number_pattern()})?{COMPACTED})?",
    re.DOTALL,
)
"""The name of a file that a subtask or a merge writes; the groups are its table, and
the attempt, which only files of managed jobs have."""

_EPOCH_RECORD = re.compile(EPOCH_RECORD)
OWNERSHIP_DIRECTORY = f"{OUR_DIRECTORY}/marks"
"""The directory of the marks of prefixes, at the root of the URL."""

_MARK = "ownership.json"
_BELOW_A_JOB = frozenset({OUR_DIRECTORY, "generations", "epochs", "checkpoints"})


class Layout(enum.Enum):
    """How the objects around the data files are arranged."""

    LEGACY = "legacy"
    PROTOCOL = "protocol"


@dataclass(frozen=True, order=True)
class JobPaths:
    """The object paths of one job. `pipeline` is None in the legacy layout.

    Fixed paths are computed once, because gc uses them for every object.
    """

    job: JobId
    pipeline: PipelineId | None = None

    @cached_property
    def layout(self) -> Layout:
        """The layout: a job with a pipeline has the protocol layout."""
        return Layout.LEGACY if self.pipeline is None else Layout.PROTOCOL

    @cached_property
    def root(self) -> StatePath:
        """The job's own directory: `{job}`, or `{pipeline}/{job}`."""
        return StatePath(self.job if self.pipeline is None else f"{self.pipeline}/{self.job}")

    def contains(self, path: str) -> bool:
        """Return whether an object lies below the job's own directory."""
        return path.startswith(f"{self.root}/")

    def __hash__(self) -> int:
        return hash(self.root)

    # ---- of this package, in both layouts --------------------------------------------------------

    @cached_property
    def maintenance(self) -> StatePath:
        """The directory that only this package uses; Arroyo never reads it."""
        return self.root / OUR_DIRECTORY

    @cached_property
    def stop_request(self) -> StatePath:
        """The request to stop the job with a checkpoint; the job deletes it."""
        return self.maintenance / "stop-request.json"

    @cached_property
    def compactions(self) -> StatePath:
        """The directory of compaction records that wait for the job's writer."""
        return self.maintenance / "compactions"

    def compaction_record(self, epoch: Epoch, name: str) -> StatePath:
        """Return the compaction record of this name, of a compaction of this epoch."""
        return self.compactions / f"{epoch:07}-{name}.json"

    def topic(self, topic: str) -> StatePath:
        """Return the directory of records that an SDF service publishes to other services."""
        return self.maintenance / "topics" / topic

    def stdin(self, topic: str) -> StatePath:
        """Return the directory of lines from a pipe, kept until their epoch is ready."""
        return self.maintenance / "stdin" / topic

    def spark_source(self, name: str) -> StatePath:
        """Return the directory of rows that a Spark source has staged for the job."""
        return self.maintenance / "landed" / name

    def spark_sink(self, name: str) -> StatePath:
        """Return the directory of rows that a Spark sink has staged for unfinished epochs."""
        return self.maintenance / "spark-sinks" / name

    @cached_property
    def leases(self) -> StatePath:
        """The leases of the job's maintenance: one object each; the highest number is valid."""
        return self.maintenance / "leases"

    @cached_property
    def writers(self) -> StatePath:
        """The leases of the job's writers in the legacy layout, which has no worker generations."""
        return self.maintenance / "writers"

    @cached_property
    def job_pins(self) -> StatePath:
        """What stays in addition to the newest epochs: pins, and the contents of quarantine."""
        return self.maintenance / "retained.json"

    @cached_property
    def journal(self) -> StatePath:
        """What was deleted, when, by whom and under which plan: one directory per run."""
        return self.maintenance / "journal"

    @cached_property
    def removal(self) -> StatePath:
        """The plan of an unfinished removal of a dead job."""
        return self.maintenance / "removal.json"

    @cached_property
    def quarantine(self) -> StatePath:
        """The objects that were moved to quarantine instead of deleted: one directory per run."""
        return self.maintenance / "quarantine"

    def quarantine_index(self, name: str) -> StatePath:
        """Return the index of one quarantine, with the files that its epochs need in addition."""
        return self.quarantine / name / QUARANTINE_INDEX

    @cached_property
    def changes(self) -> StatePath:
        """What compactions in place, edits and rebuilds changed, with the bytes from before: one
        record each.
        """
        return self.maintenance / "changes"

    @cached_property
    def copy_marker(self) -> StatePath:
        """From where the job is being copied; deleted once the copy is complete."""
        return self.maintenance / "copy.json"

    @cached_property
    def window(self) -> StatePath:
        """The open maintenance window; if its process is gone, the job must be started again."""
        return self.maintenance / "window.json"

    @cached_property
    def windows(self) -> StatePath:
        """The leases of the job's maintenance windows."""
        return self.maintenance / "windows"

    def commit_note(self, epoch: Epoch) -> StatePath:
        """Return the commit note of an epoch of the legacy layout: its commit is finished.

        Arroyo records this in its database.
        """
        return self.maintenance / "commits" / f"epoch-{epoch:07}.json"

    # ---- protocol --------------------------------------------------------------------------------

    @cached_property
    def current_generation(self) -> StatePath:
        """The fence: the worker generation that may write."""
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
        """Return the directory of one worker generation; its number is not padded."""
        return self.generations / str(generation)

    def generation_manifest(self, generation: WorkerGeneration) -> StatePath:
        """Return the manifest of a worker generation: its start, and its latest checkpoint."""
        return StatePath(f"{self.root}/generations/{generation}/{GENERATION_MANIFEST}")

    def epoch_record(self, epoch: Epoch) -> StatePath:
        """Return the record that names the checkpoint which owns an epoch."""
        return StatePath(f"{self.root}/epochs/epoch-{epoch:07}.record")

    def manifest(self, generation: WorkerGeneration, epoch: Epoch) -> StatePath:
        """Return the manifest of an epoch that a worker generation wrote."""
        return self._in_checkpoint(epoch, generation, CHECKPOINT_MANIFEST)

    def committed(self, generation: WorkerGeneration, epoch: Epoch) -> StatePath:
        """Return the marker of a finished commit."""
        return self._in_checkpoint(epoch, generation, COMMITTED_MARKER)

    # ---- both ------------------------------------------------------------------------------------

    def checkpoints(self, generation: WorkerGeneration | None = None) -> StatePath:
        """Return the directory of checkpoints; None = of the legacy layout."""
        base = self.root if generation is None else self.generation(generation)
        return base / "checkpoints"

    def checkpoint(self, epoch: Epoch, generation: WorkerGeneration | None = None) -> StatePath:
        """Return the directory of one epoch, its number padded to at least 7 digits."""
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
        """Return the directory of one operator at one epoch."""
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
        """Return the path of a data file; a unique `attempt` prevents retries from overwriting."""
        name = f"operator-{operator}/table-{table}-{subtask:03}-{attempt}"
        return self._in_checkpoint(epoch, generation, name)

    def subtask_file(
        self,
        operator: OperatorId,
        table: TableName,
        subtask: int,
        epoch: Epoch,
        generation: WorkerGeneration | None = None,
    ) -> StatePath:
        """Return the path of the data file that a subtask of Arroyo writes."""
        name = f"operator-{operator}/table-{table}-{subtask:03}"
        return self._in_checkpoint(epoch, generation, name)

    def subtask_metadata(
        self,
        operator: OperatorId,
        subtask: int,
        epoch: Epoch,
        generation: WorkerGeneration | None = None,
    ) -> StatePath:
        """Return the path of a subtask's checkpoint report; Arroyo neither writes nor reads it."""
        return self._in_checkpoint(epoch, generation, f"operator-{operator}-{subtask}.metadata")

    def operator_metadata(
        self, operator: OperatorId, epoch: Epoch, generation: WorkerGeneration | None = None
    ) -> StatePath:
        """Return the path of the merged metadata of one operator at one epoch."""
        return self._in_checkpoint(epoch, generation, operator_metadata_name(operator))

    def head(self, epoch: Epoch) -> StatePath:
        """Return the path of the object that makes an epoch exist."""
        legacy = self.layout is Layout.LEGACY
        return self.legacy_metadata(epoch) if legacy else self.epoch_record(epoch)

    def legacy_metadata(self, epoch: Epoch) -> StatePath:
        """Return the path of the object that makes an epoch exist in the legacy layout."""
        return self._in_checkpoint(epoch, None, "metadata")


def index_batch(paths: JobPaths, quarantine: str, number: int) -> StatePath:
    """Return a part of the index of a quarantine; parts are numbered from 1."""
    return paths.quarantine / quarantine / f"part-{number:06}.json"


def operator_metadata_name(operator: str) -> str:
    """Return the name of an operator's merged metadata, relative to the directory of its epoch."""
    return f"operator-{operator}/metadata"


def probe_path(beside: str, unique: str) -> StatePath:
    """Return a new name in the job of the object `beside`, or below the URL's root without a job.

    It lies in the directory of leases, where every release counts it as a maintenance object and
    none takes it for a lease.
    """
    segments = beside.split("/")
    depth = next((i for i in (2, 1) if i < len(segments) and segments[i] in _BELOW_A_JOB), 0)
    return StatePath("/".join((*segments[:depth], OUR_DIRECTORY, "leases", f"{PROBE}{unique}")))


def mark_path(prefix: str) -> StatePath:
    """Return the object that marks a prefix as not maintained; `.` is the root of the URL."""
    return StatePath("/".join((OWNERSHIP_DIRECTORY, *([] if prefix == "." else [prefix]), _MARK)))


def parse_mark_path(path: str) -> str | None:
    """Return the prefix that an object marks; None for any other object."""
    directory, _, name = path.rpartition("/")
    if name != _MARK or not f"{directory}/".startswith(f"{OWNERSHIP_DIRECTORY}/"):
        return None
    return directory[len(OWNERSHIP_DIRECTORY) + 1 :] or "."


def rewritten_attempt(unique: str) -> str:
    """Return the attempt in the name of a data file that this package writes into an Arroyo job.

    Neither a subtask of Arroyo (`table-t-000`) nor its compaction (`…-compacted`) ever writes such
    a name, and `unique` distinguishes the attempts of this package.
    """
    return f"{_REWRITTEN.removeprefix('-')}{unique}"


def is_rewritten(path: str) -> bool:
    """Return whether this package wrote a data file into an Arroyo job."""
    return _REWRITTEN_NAME.search(path) is not None


def is_compacted(path: str) -> bool:
    """Return whether a data file of a managed job is the output of a merge."""
    return path.endswith(COMPACTED)


def compacted(level: int) -> str:
    """Return the suffix of a data file that was merged `level` times, at least once."""
    return COMPACTED if level == 1 else f"-l{level}{COMPACTED}"


def compaction_level(path: str) -> int:
    """Return how many times a managed job's data file was merged, by its name; 0 = never."""
    if not is_compacted(path):
        return 0
    match = _LEVEL.search(path)
    return max(1, int(match[1])) if match else 1


def parse_epoch_record(name: str) -> Epoch | None:
    """Return the epoch in the name of an epoch record; None for any other name."""
    match = _EPOCH_RECORD.fullmatch(name)
    return Epoch(int(match[1])) if match else None


def parse_checkpoint_dir(name: str) -> Epoch | None:
    """Return the number in a checkpoint directory's name; its files may be of another epoch."""
    match = _CHECKPOINT.fullmatch(name)
    return Epoch(int(match[1])) if match else None


def staged_name(epoch: Epoch, subtask: int, unique: str, suffix: str) -> str:
    """Return the name of a file that a subtask of a sink stages for an epoch."""
    return f"{epoch:07}-{subtask:03}-{unique}{suffix}"


def parse_staged_name(name: str) -> Epoch | None:
    """Return the epoch in the name of a file that a sink has staged; None for any other name."""
    match = _STAGED.fullmatch(name)
    return Epoch(int(match[1])) if match else None


def parse_staged_subtask(name: str) -> int | None:
    """Return the subtask in the name of a file that a sink has staged; None for any other name."""
    match = _STAGED.fullmatch(name)
    return int(match[2]) if match else None


@dataclass(frozen=True, slots=True)
class ManifestAddress:
    """The parts of a manifest's path."""

    paths: JobPaths
    worker_generation: WorkerGeneration
    epoch: Epoch


def parse_manifest_path(path: str) -> ManifestAddress | None:
    """Parse the path of a `checkpoint-manifest.pb`; None for any other path."""
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


@dataclass(frozen=True, slots=True)
class MetadataAddress:
    """What the path of a metadata object says of it; None: nothing.

    Attributes:
        worker_generation: of a manifest, or of the manifest of a generation.
    """

    epoch: Epoch | None = None
    worker_generation: WorkerGeneration | None = None
    operator: OperatorId | None = None


def parse_metadata_path(paths: JobPaths, path: str) -> MetadataAddress:
    """Parse the path of a metadata object of a job, in either layout."""
    rest = path.removeprefix(f"{paths.root}/")
    if (match := _IN_CHECKPOINT.fullmatch(rest)) is not None:
        generation, epoch, operator = match.groups()
        return MetadataAddress(
            epoch=Epoch(int(epoch)),
            worker_generation=None if generation is None else WorkerGeneration(int(generation)),
            operator=None if operator is None else OperatorId(operator),
        )
    if (match := _RECORD.fullmatch(rest)) is not None:
        return MetadataAddress(epoch=Epoch(int(match[1])))
    if (match := _GENERATION.fullmatch(rest)) is not None:
        return MetadataAddress(worker_generation=WorkerGeneration(int(match[1])))
    return MetadataAddress()


@dataclass(frozen=True, slots=True)
class OperatorObject:
    """What the path of an object below an operator's directory says of it.

    Attributes:
        checkpoint: the directory of its epoch.
        table: of a data file that a subtask or a merge wrote; None for the operator's metadata.
        managed: whether only a managed job gives such a name to a file.
    """

    checkpoint: str
    operator: OperatorId
    table: TableName | None
    managed: bool = False


def parse_operator_object(paths: JobPaths, path: str) -> OperatorObject | None:
    """Parse the path of a data file or of an operator's metadata; None for any other object."""
    start = path.find("/operator-", len(paths.root))
    operator, _, file = path[start + len("/operator-") :].rpartition("/")
    match = _TABLE_FILE.fullmatch(file)
    if start < 0 or not operator or (match is None and file != "metadata"):
        return None
    table = None if match is None else TableName(match[1])
    managed = match is not None and match[2] is not None
    return OperatorObject(path[:start], OperatorId(operator), table, managed)


def is_data_file(path: str) -> bool:
    """Whether an object is a data file of a checkpoint, by its path."""
    *directories, name = path.split("/")
    within = any(parse_checkpoint_dir(directory) is not None for directory in directories)
    return within and name.startswith("table-")


def written_epoch(path: str) -> Epoch | None:
    """Return the epoch in whose directory a data file was written; None = in none."""
    epochs = (parse_checkpoint_dir(segment) for segment in path.split("/"))
    return next((epoch for epoch in epochs if epoch is not None), None)


def parse_data_file(path: str, table: str) -> int | None:
    """Return the subtask in the name of a data file that it wrote; None for any other file."""
    name = path.rpartition("/")[2]
    pattern = rf"table-{re.escape(table)}-({number_pattern(3)})(-.*)?"
    match = re.fullmatch(pattern, name, re.DOTALL)
    return int(match[1]) if match and not is_compacted(name) else None
