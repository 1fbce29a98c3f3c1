"""Whether a micro-batch is the next one of its query, a repeat, or one of another query."""

from __future__ import annotations

import enum
from dataclasses import replace

from arroyo_dagster.errors import ConflictError, ProtocolError
from arroyo_dagster.state.model.checkpoints import Checkpoint, StreamProgress

ADOPT = "run it again with --adopt: it goes on from the offsets recorded with the state"


class BatchVerdict(enum.Enum):
    """What to do with a micro-batch."""

    NEXT = "next"
    REPEAT = "repeat"


def batch_verdict(
    recorded: StreamProgress | None, query_id: str, batch_id: int, offsets: str, *, adopt: bool
) -> BatchVerdict:
    """Decide whether a micro-batch is the next one, or one that the newest epoch already contains.

    A repeat has the recorded query id *and* batch id. Anything else that is not the next batch of
    the same query is refused, so that no data is silently skipped. After a rollback, the first
    batch (id 0) of any query is accepted; it starts at the recorded offsets.

    Args:
        recorded: the progress of the newest epoch; None for a job without state.
        offsets: the offsets of the sources after the batch, as JSON text.
        adopt: the user allows a new query to continue from the recorded offsets. Applies to the
            first batch of a query only.

    Raises:
        ConflictError: another query, a gap in the batch ids, or a job without state whose first
            batch is not number 0. `next_step` says how to continue.
        ProtocolError: a repeat whose offsets differ from the recorded ones.
    """
    if recorded is None:
        if batch_id == 0:
            return BatchVerdict.NEXT
        raise ConflictError(
            f"the job has no state, but the streaming query is already at batch {batch_id}: the "
            "state of earlier batches is gone, or is stored under another URL or job",
            query_id=query_id,
            next_step="check --url and the job; to start anew, give another --spark-checkpoint",
        )
    if query_id != recorded.query_id:
        adopts = adopt or recorded.rolled_back_to is not None
        if adopts and batch_id == 0:
            return BatchVerdict.NEXT  # a new query, which begins at the recorded offsets
        if adopts:
            raise ConflictError(
                f"a query that is already at batch {batch_id} does not continue from the "
                "recorded offsets, but from its own",
                query=query_id,
                next_step="set --spark-checkpoint to a directory that does not exist yet",
            )
        raise another_query(recorded, query=query_id, batch=batch_id)
    if batch_id == recorded.batch_id:
        if offsets != recorded.offsets:
            raise ProtocolError(
                f"batch {batch_id} comes again with other offsets",
                recorded=recorded.offsets,
                given=offsets,
            )
        return BatchVerdict.REPEAT
    if batch_id == recorded.batch_id + 1:
        return BatchVerdict.NEXT
    raise ConflictError(
        f"batch {batch_id} does not follow batch {recorded.batch_id} of the newest epoch: "
        + ("data would be skipped" if batch_id > recorded.batch_id else "data would be duplicated"),
        query=query_id,
        next_step=ADOPT,
    )


def carried_progress(base: Checkpoint) -> StreamProgress | None:
    """Return the progress of an epoch that follows `base` and processes no rows.

    The epoch has the content of `base`. If a rollback published `base`, the new epoch is recorded
    as a rollback to `base`.
    """
    if base.progress is None or base.progress.rolled_back_to is None:
        return base.progress
    return replace(base.progress, batch_id=base.epoch)


def another_query(recorded: StreamProgress, **found: object) -> ConflictError:
    """Return the error for a query that did not write the newest epoch."""
    return ConflictError(
        "the job's newest epoch was written by another streaming query (was Spark's checkpoint "
        "directory removed or recreated?)",
        recorded_query=recorded.query_id,
        recorded_batch=recorded.batch_id,
        next_step=ADOPT,
        **found,  # type: ignore[arg-type]
    )
