"""Can a job be restored from an epoch, and if not, why: every fact gathered, every rule asked.

Nothing here writes. Files are looked at one by one, their rows a few thousand at a time: memory
depends on the number of files, never on their size.
"""

from __future__ import annotations

from dataclasses import dataclass

from arroyo_dagster.state.metadata.backend import ParquetBackend
from arroyo_dagster.state.model.ids import Epoch
from arroyo_dagster.state.model.layout import JobPaths
from arroyo_dagster.state.model.verify import HISTORY, MAX_LEVEL, VerifySettings
from arroyo_dagster.state.operations.catalog.footers import expired_meanwhile
from arroyo_dagster.state.operations.catalog.query import chosen_epoch
from arroyo_dagster.state.operations.verify.data import DataFindings, data_findings
from arroyo_dagster.state.operations.verify.metadata import JobMetadata, read_job_metadata
from arroyo_dagster.state.operations.verify.rows import CheckDepth
from arroyo_dagster.state.planning.verify.findings import Verdict
from arroyo_dagster.state.planning.verify.restore import SubtaskRestore
from arroyo_dagster.state.storage.store import ObjectStore
from arroyo_dagster.state.tables.known.catalogue import Catalogue, default_catalogue

__all__ = ["HISTORY", "MAX_LEVEL", "JobVerdict", "verify_job"]

_ATTEMPTS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class JobVerdict:
    """Whether a job can be restored from an epoch.

    Attributes:
        level: how closely it was looked at.
        parallelism: of the restore that was simulated; None = each operator's own.
        verdict: `inspected` counts data files and metadata objects.
        restore: what each subtask opens and keeps; empty below level 4.
        epochs: those looked at for what happened between them, ascending.
    """

    paths: JobPaths
    epoch: Epoch
    level: int
    parallelism: int | None
    verdict: Verdict
    restore: tuple[SubtaskRestore, ...] = ()
    epochs: tuple[Epoch, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether nothing found is an error."""
        return self.verdict.passed


def verify_job(
    store: ObjectStore,
    paths: JobPaths,
    epoch: int | None = None,
    *,
    level: int = MAX_LEVEL,
    parallelism: int | None = None,
    history: int = HISTORY,
    catalogue: Catalogue | None = None,
) -> JobVerdict:
    """Say whether a job can be restored from an epoch, and what is wrong if not.

    Metadata is looked at in full at every level: ownership, chain of parents, commit, fence, what
    the next start would restore, and what happened to files from one epoch to the next.

    Args:
        epoch: the newest visible one when None.
        level, parallelism, history: see `VerifySettings`.
        catalogue: how entries decode whose types the job did not store; None = what this process
            knows.

    Raises:
        InputError: no such level, or no parallelism.
        NotFoundError: the job has no such epoch, or none at all.
        ConflictError: epochs expire faster than they can be looked at.
        StorageError: the store failed.
    """
    asked = VerifySettings(level=level, parallelism=parallelism, history=history)
    look = CheckDepth(
        level=asked.level,
        parallelism=asked.parallelism,
        catalogue=catalogue or default_catalogue(),
    )
    for _ in range(_ATTEMPTS):
        epochs = ParquetBackend(store, paths).epochs()
        wanted = chosen_epoch(store, paths, epochs, epoch)
        found = read_job_metadata(store, paths, epochs, wanted, asked.history)
        verdict = _judge(store, paths, found, look)
        # What an expiry takes away meanwhile is no damage.
        if verdict.passed or set(epochs) <= set(ParquetBackend(store, paths).epochs()):
            return verdict
    raise expired_meanwhile(store, paths, "try again with a lower level, or keep more epochs")


def _judge(store: ObjectStore, paths: JobPaths, found: JobMetadata, look: CheckDepth) -> JobVerdict:
    data = DataFindings() if found.checkpoint is None else data_findings(store, paths, found, look)
    return JobVerdict(
        paths=paths,
        epoch=found.epoch,
        level=look.level,
        parallelism=look.parallelism,
        verdict=Verdict(
            findings=(*found.findings, *data.findings), inspected=found.objects + data.inspected
        ),
        restore=data.restore,
        epochs=tuple(one.epoch for one in found.history),
    )
