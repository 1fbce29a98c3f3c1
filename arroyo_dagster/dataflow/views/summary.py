"""Summaries of states for a catalog, and checks of them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from arroyo_dagster.dataflow.definition.definition import StateDef
from arroyo_dagster.dataflow.storage.columns import KEY, WINDOW_END, WINDOW_START
from arroyo_dagster.dataflow.views.snapshots import Where
from arroyo_dagster.dataflow.views.view import StateView, Views
from arroyo_dagster.state.model.checkpoints import Checkpoint
from arroyo_dagster.state.model.ids import StatePath, WorkerGeneration
from arroyo_dagster.state.model.tables import ExpiringTimeKeyFiles
from arroyo_dagster.state.planning.privacy import PRIVATE
from arroyo_dagster.state.planning.restore.reads import job_watermark_micros
from arroyo_dagster.state.planning.verify.findings import Finding, Verdict, error, warning
from arroyo_dagster.state.storage.concurrency import concurrently
from arroyo_dagster.state.storage.store import ObjectStore

SAMPLE_ROWS = 10
READ_BYTES = 64 << 20
_SHORTEST_TTL_MS = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSummary:
    """One state at one epoch of its owner.

    Attributes:
        epoch, generation: the owner's epoch and worker generation; None = it has no epoch yet.
        finished_micros: the time at which the epoch was finished, in epoch microseconds.
        watermark_micros: the owner's watermark; None = none yet.
        files, size_bytes: the number and total size of the files that the state's table lists.
        rows: the rows that a reader sees; None if the files exceed the limit of bytes to read.
        keys: the distinct keys, per window, of all stored rows, expired ones included.
        expired_rows: the stored rows that no reader sees.
        oldest_ms: the update time of the oldest visible row, in epoch milliseconds.
        sample: the first rows; values that are not simple are text.
        version: a hash of the listed paths; it changes only if they change.
        listed: the files that the state's table lists.
    """

    state: StateDef
    epoch: int | None = None
    generation: WorkerGeneration | None = None
    finished_micros: int | None = None
    watermark_micros: int | None = None
    files: int = 0
    size_bytes: int = 0
    rows: int | None = None
    keys: int | None = None
    expired_rows: int | None = None
    oldest_ms: int | None = None
    sample: tuple[Mapping[str, Any], ...] = ()
    version: str = ""
    listed: tuple[Any, ...] = field(default=(), repr=False)


def summarise(
    store: ObjectStore, views: Views, states: Sequence[StateDef], *, read_bytes: int = READ_BYTES
) -> list[StateSummary]:
    """Summarize states at the epochs of `views`.

    Args:
        store: the object store of the states.
        views: the views of the dataflow.
        states: the states to summarize.
        read_bytes: if a table's files are larger in total, its rows are not read.

    Raises:
        CheckpointError: a file of a state cannot be read (E51).
    """
    return [_summary(store, views, state, read_bytes) for state in states]


def _summary(store: ObjectStore, views: Views, state: StateDef, read_bytes: int) -> StateSummary:
    head = views.head(state.owner)
    if head is None:
        return StateSummary(state=state)
    listed, paths = _listed(head, state)
    size = sum(info.size_bytes for info in concurrently(store.head, paths) if info is not None)
    facts: dict[str, Any] = {
        "state": state,
        "epoch": head.epoch,
        "generation": head.worker_generation,
        "finished_micros": head.finish_time_micros,
        "watermark_micros": job_watermark_micros(head),
        "files": len(paths),
        "size_bytes": size,
        "version": hashlib.sha256("\n".join(paths).encode()).hexdigest()[:16],
        "listed": listed,
    }
    if size > read_bytes:
        return StateSummary(**facts)
    return StateSummary(**facts, **_rows(views.view(f"{state.owner}.{state.name}")))


def _listed(head: Checkpoint, state: StateDef) -> tuple[tuple[Any, ...], list[StatePath]]:
    where = Where.of(state)
    operator = head.operator(where.operator)
    files = operator.tables.get(where.table) if operator is not None else None
    if files is None:
        return (), []
    if isinstance(files, ExpiringTimeKeyFiles):
        return files.files, [file.path for file in files.files]
    return files.files, list(files.files)


def _rows(view: StateView) -> dict[str, Any]:
    frame = view.frame()
    windows = [name for name in (WINDOW_START, WINDOW_END) if name in view.stored.columns]
    oldest = view.oldest_ms()
    return {
        "rows": frame.height,
        "keys": view.stored.select(*windows, KEY).n_unique() if view.stored.height else 0,
        "expired_rows": view.stored.height - frame.height,
        "oldest_ms": oldest,
        "sample": tuple(_plain(row) for row in frame.head(SAMPLE_ROWS).iter_rows(named=True)),
    }


def _plain(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return simple values and texts. Only masked values are null: others have a default."""
    simple = (bool, int, float, str)
    return {
        name: PRIVATE if value is None else value if isinstance(value, simple) else str(value)
        for name, value in row.items()
    }


# ---- verdicts ------------------------------------------------------------------------------------


def keys_unique(summary: StateSummary) -> Verdict:
    """Check that every key of a state has one row in each window."""
    findings: list[Finding] = []
    if summary.rows is not None and summary.keys is not None:
        stored = summary.rows + (summary.expired_rows or 0)
        if stored > summary.keys:
            evidence = f"{stored} rows of {summary.keys} keys at epoch {summary.epoch}"
            findings.append(error("key-twice", _name(summary), evidence, _REPORT))
    return Verdict(findings=tuple(findings), inspected=summary.rows or 0)


def ttl_effective(summary: StateSummary, *, now_ms: int) -> Verdict:
    """Check that expired rows of a state are neither visible nor stored permanently.

    A visible row that expired more than a second ago is an error. A file whose rows are all older
    than twice the TTL at the end of the epoch is a warning: the owner should have dropped it.
    States with windows or without a TTL are not checked.

    Args:
        summary: the summary of the state.
        now_ms: the engine's clock, in epoch milliseconds.
    """
    ttl = summary.state.ttl_ms
    if ttl is None or summary.state.window is not None:
        return Verdict(findings=(), inspected=0)
    return Verdict(findings=tuple(_ttl_findings(summary, ttl, now_ms)), inspected=summary.files)


def _ttl_findings(summary: StateSummary, ttl_ms: int, now_ms: int) -> Iterator[Finding]:
    if summary.oldest_ms is not None and now_ms - summary.oldest_ms > ttl_ms + _SHORTEST_TTL_MS:
        evidence = f"a row updated {now_ms - summary.oldest_ms} ms ago is shown, ttl {ttl_ms} ms"
        yield error("expired-row-shown", _name(summary), evidence, _REPORT)
    if summary.finished_micros is None:
        return
    let_go = summary.finished_micros // 1000 - max(2 * ttl_ms, _SHORTEST_TTL_MS)
    old = [file for file in summary.listed if file.max_timestamp_micros // 1000 < let_go]
    if old:
        evidence = f"{len(old)} of {summary.files} files hold only rows older than twice the ttl"
        yield warning("expired-rows-kept", old[0].path, evidence, _LET_GO)


_REPORT = "keep the epoch and report it, with the output of `arroyo-state verify`"
_LET_GO = "run the owner, or compact the job: both drop such files"


def _name(summary: StateSummary) -> str:
    return f"{summary.state.owner}.{summary.state.name}"
