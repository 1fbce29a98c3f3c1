"""Deletion of expired epochs by the run that writes new ones."""

from __future__ import annotations

import contextlib
import logging

from arroyo_dagster.errors import ArroyoStateError, ConflictError, NotFoundError, StorageError
from arroyo_dagster.state.metadata.backend import StateBackend
from arroyo_dagster.state.model.ids import Epoch
from arroyo_dagster.state.runtime.pipeline import Pipeline
from arroyo_dagster.state.runtime.task import EpochPlan

_LOG = logging.getLogger(__name__)
CLEANUP_EVERY_EPOCHS = 4


class RunRetention:
    """The retention of one run. A failure of the store does not stop the run.

    Attributes:
        failures: how often expired epochs could not be deleted.
        overdue_epochs: how many of them the last failure left; 0 once retention has succeeded.
    """

    def __init__(self, pipeline: Pipeline, backend: StateBackend) -> None:
        self._pipeline = pipeline
        self._backend = backend
        self.failures = 0
        self.overdue_epochs = 0
        self._failed_in_a_row = 0

    def expire(self, plan: EpochPlan) -> None:
        """Delete the epochs before the oldest one to keep, if a cleanup is due.

        Raises:
            ConflictError: a newer run was started.
        """
        # Retry at once only after the first failure: a lasting one must not slow every epoch.
        retries = self._failed_in_a_row == 1
        due = plan.epoch % CLEANUP_EVERY_EPOCHS == 0 or plan.then_stop or retries
        if self._pipeline.keep_epochs is None or not due or plan.min_epoch <= 1:
            return
        try:
            self._backend.cleanup_checkpoint(plan.min_epoch)
        except ConflictError:
            raise
        except ArroyoStateError as error:
            self._report_overdue(plan.min_epoch, error)
        else:
            self.overdue_epochs = self._failed_in_a_row = 0

    def _report_overdue(self, min_epoch: Epoch, error: ArroyoStateError) -> None:
        """Count and log the epochs left for the next attempt; the epoch just written exists."""
        self.failures += 1
        self._failed_in_a_row += 1
        with contextlib.suppress(StorageError, NotFoundError):
            left = self._backend.every_epoch()
            self.overdue_epochs = sum(epoch < min_epoch for epoch in left)
        _LOG.warning(
            "retention of job %s failed; %d epochs before epoch %d stay until the next attempt: %s",
            self._pipeline.paths.root,
            self.overdue_epochs,
            min_epoch,
            error,
        )
