"""A job that writes down where its subtasks run, and what became of it."""

from __future__ import annotations

import gc
import json
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa

from arroyo_dagster.engine import Collector, Operator, OperatorContext, Pipeline, TableSource
from arroyo_dagster.state import ObjectStore, ParquetBackend, TableConfig, global_table_config
from tests.words import tables_of

KEYS = 400


class Located(Operator):
    """Counts rows by key, and appends to a log: each start, each epoch, the copies in memory."""

    def __init__(
        self, log: str, ballast_bytes: int = 0, count_copies_every: int = 1, fail: str | None = None
    ) -> None:
        self._log = log
        self._fail = fail
        self._ballast_bytes = ballast_bytes
        self._every = count_copies_every
        self.started = False

    def tables(self) -> Sequence[TableConfig]:
        return [global_table_config("counts", key=str, value=int)]

    def on_start(self, ctx: OperatorContext) -> None:
        self.started = True
        self.counts = ctx.table_manager.get_global_keyed_state("counts", str, int)
        self.ballast = b"\x01" * self._ballast_bytes
        self._write(event="start", subtask=ctx.task_info.task_index)

    def process_batch(
        self, batch: pa.RecordBatch, ctx: OperatorContext, collector: Collector
    ) -> None:
        for key in batch["key"].to_pylist():
            self.counts.insert(key, (self.counts.get(key) or 0) + 1)

    def handle_checkpoint(self, ctx: OperatorContext, collector: Collector) -> None:
        if self._fail is not None:
            raise ValueError(self._fail)
        copies = None
        if ctx.epoch % self._every == 0:
            gc.collect()
            copies = sum(isinstance(one, type(self)) and one.started for one in gc.get_objects())
        where = {"subtask": ctx.task_info.task_index, "epoch": ctx.epoch}
        self._write(event="epoch", **where, copies=copies)

    def _write(self, **fact: Any) -> None:
        line = json.dumps({**fact, "process": os.getpid()}) + "\n"
        file = os.open(self._log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(file, line.encode())
        os.close(file)


def located_pipeline(
    log: Path,
    *,
    epochs: int,
    rows_per_epoch: int = KEYS,
    parallelism: int = 8,
    name: str = "located",
    **options: Any,
) -> Pipeline:
    """One level of subtasks that each get rows in every epoch."""
    rows = epochs * rows_per_epoch
    table = pa.table(
        {
            "key": [f"key-{number % KEYS}" for number in range(rows)],
            "at": pa.array(range(rows), pa.timestamp("ms")),
        }
    )
    pipeline = Pipeline(name, parallelism=parallelism, merge_files_after=8)
    source = TableSource(table, rows_per_epoch=rows_per_epoch, splits=2)
    keyed = pipeline.source("rows", source, timestamp="at").key_by("key")
    keyed.apply("count", Located(str(log), **options))
    return pipeline


def counts_of(store: ObjectStore, pipeline: Pipeline) -> dict[str, int]:
    """What a restart would find."""
    tables = tables_of(store, ParquetBackend(store, pipeline.paths).load())
    return dict(tables["count.counts"])


@dataclass(frozen=True, slots=True)
class Places:
    """What the log says.

    Attributes:
        processes: of each subtask, the process of each epoch, in order.
        starts: of each subtask, how often its operator was started.
        copies: by epoch, how many started operators all processes held.
    """

    processes: dict[int, list[int]]
    starts: Counter[int]
    copies: dict[int, int]

    @classmethod
    def read(cls, log: Path, *, up_to_epoch: int | None = None, after_epoch: int = 0) -> Places:
        processes: dict[int, dict[int, int]] = {}
        starts: Counter[int] = Counter()
        copies: dict[int, dict[int, int]] = {}
        started: Counter[int] = Counter()  # since the last epoch of the subtask
        for line in log.read_text().splitlines():
            fact = json.loads(line)
            subtask = fact["subtask"]
            if fact["event"] == "start":
                started[subtask] += 1
                continue
            before, epoch = started.pop(subtask, 0), fact["epoch"]
            if epoch <= after_epoch or (up_to_epoch is not None and epoch > up_to_epoch):
                continue
            starts[subtask] += before
            processes.setdefault(subtask, {})[epoch] = fact["process"]
            if fact["copies"] is not None:
                held = copies.setdefault(epoch, {})
                held[fact["process"]] = max(fact["copies"], held.get(fact["process"], 0))
        return cls(
            {subtask: [by[e] for e in sorted(by)] for subtask, by in sorted(processes.items())},
            starts,
            {epoch: sum(held.values()) for epoch, held in copies.items()},
        )

    @property
    def moves(self) -> dict[int, int]:
        """Of each subtask, how often an epoch ran in another process than the one before."""
        return {
            subtask: sum(a != b for a, b in pairwise(found))
            for subtask, found in self.processes.items()
        }
