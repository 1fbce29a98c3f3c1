"""The sensor that reports new epochs: one event per tick for each pipeline that has some.

Events are stored before the cursor moves, so a daemon that is killed in between repeats a tick.
Events that the instance already has are skipped: none is duplicated or lost.
"""

import itertools
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import dagster as dg

from arroyo_dagster.errors import ArroyoStateError, InputError, NotFoundError
from arroyo_dagster.orchestration.dataflow.assets import StatesReport
from arroyo_dagster.orchestration.rendering import (
    DATA_VERSION,
    counted,
    known,
    number,
    table,
    time_of_day,
    timestamp,
)
from arroyo_dagster.orchestration.resources import ArroyoStateStore
from arroyo_dagster.orchestration.translator import CHECKPOINT, Names
from arroyo_dagster.orchestration.verify.verdict import FIGURES, TABLES, tables_metadata
from arroyo_dagster.state.model.checkpoints import Checkpoint
from arroyo_dagster.state.model.clock import wall_clock
from arroyo_dagster.state.model.health import EpochFigures
from arroyo_dagster.state.model.ids import Epoch, TableName, WorkerGeneration
from arroyo_dagster.state.model.json_fields import parse_json
from arroyo_dagster.state.model.layout import JobPaths, Layout
from arroyo_dagster.state.planning.health_checks.facts import epoch_figures
from arroyo_dagster.state.planning.polling import (
    TICK_SECONDS,
    Requests,
    poll_interval_seconds,
    sweep,
)
from arroyo_dagster.state.planning.restore.reads import job_watermark_micros

if TYPE_CHECKING:
    from arroyo_dagster.state.operations.catalog.changes import FleetChanges, FleetCursor
    from arroyo_dagster.state.operations.catalog.footers import Footers
    from arroyo_dagster.state.operations.catalog.job_changes import JobChanges, JobPosition

CURSOR_VERSION = 1
_NAMED = 10
_EPOCHS = 20
_JITTER_SECONDS = 5


@dataclass(frozen=True, kw_only=True)
class SensorOptions:
    """How much one tick does.

    Attributes:
        interval_seconds: the minimum time between two polls; None = 30 to 300 seconds, by the
            number of pipelines.
        events: the maximum number of events; remaining pipelines are not read, and come first in
            the next tick, which is not delayed.
        budget_seconds: nothing is started after it; Dagster ends a tick at 60.
        files_per_job: for a pipeline with more files, bytes and rows are left out.
        source_rates: also show how far and how fast each partition of the sources is read; this
            reads the positions of the newest 20 epochs.
    """

    interval_seconds: int | None = None
    events: int = 300
    budget_seconds: float = 20.0
    files_per_job: int = 256
    source_rates: bool = False


def build_checkpoint_sensor(
    names: Names,
    *,
    options: SensorOptions | None = None,
    states: StatesReport | None = None,
    state_keys: Sequence[dg.AssetKey] = (),
    running: bool = False,
) -> dg.SensorDefinition:
    """Build the sensor of a deployment. It is stopped unless `running`, since installing starts
    nothing.

    Args:
        states: reports the dataflows whose services are among the jobs.
        state_keys: the assets that `states` reports. The lineage in Dagster shows the sensor on
            these, and on each checkpoint.
    """
    resolved = options or SensorOptions()
    footers: list[Footers] = []  # lives as long as the code server: no footer is read twice
    keys = {listed.root: names.key(CHECKPOINT, listed) for listed in names.pipelines.pipelines}
    every = [*keys.values(), *state_keys]

    @dg.sensor(
        name=names.name("arroyo_checkpoint_sensor"),
        asset_selection=dg.AssetSelection.assets(*every) if every else None,
        minimum_interval_seconds=resolved.interval_seconds or TICK_SECONDS,
        default_status=dg.DefaultSensorStatus.RUNNING
        if running
        else dg.DefaultSensorStatus.STOPPED,
        description="Report new epochs of every pipeline below the checkpoint URL.",
        required_resource_keys=names.resources,
    )
    def arroyo_checkpoint_sensor(context: dg.SensorEvaluationContext) -> dg.SensorResult:
        from arroyo_dagster.state.operations.catalog.footers import Footers

        if not footers:
            footers.append(Footers())
        store = names.tools(context).store
        tick = _Tick(context, store, keys, names, resolved, footers[0], states)
        return tick.result(store.chosen_layout())

    return arroyo_checkpoint_sensor


# ---- one tick ------------------------------------------------------------------------------------


@dataclass
class _Tick:
    context: dg.SensorEvaluationContext
    resource: ArroyoStateStore
    keys: Mapping[str, dg.AssetKey]
    names: Names
    options: SensorOptions
    footers: "Footers"
    states: StatesReport | None = None
    events: list[dg.AssetMaterialization] = field(default_factory=list)
    reported: list[dg.AssetMaterialization] = field(default_factory=list)
    advanced: list[JobPaths] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.deadline = time.monotonic() + self.options.budget_seconds
        from arroyo_dagster.state.storage.wrappers import Counting

        self.store = Counting(self.resource.reading())

    def result(self, layout: Layout | None) -> dg.SensorResult:
        cursor = self._cursor()
        jobs = len(cursor.positions) + len(cursor.unread)
        self.interval_seconds = self.options.interval_seconds or poll_interval_seconds(jobs)
        wait_seconds = self._wait_seconds(cursor)
        if wait_seconds > 0:
            return dg.SensorResult(
                skip_reason=dg.SkipReason(
                    f"{counted(jobs, 'job')}: polled every {self.interval_seconds} s, next in "
                    f"{wait_seconds} s; no request"
                )
            )
        polled_at = wall_clock() // 1_000_000
        try:
            changes = self._changes(cursor, layout)
        except NotFoundError as error:
            # What was there once must not go unnoticed; a root that never was may come later.
            if self.context.cursor or self.keys:
                raise
            return dg.SensorResult(
                skip_reason=dg.SkipReason(f"the checkpoint URL holds no jobs yet: {error}")
            )
        self.newest = self._newest_events(changes)
        for job in changes.jobs:
            before = cursor.positions.get(job.paths)
            self._report(job, 0 if before is None else int(before.epoch))
        self._report_states()
        self._warn(cursor, changes)
        text = self._format_tick(changes)
        if self.events or self.reported or changes.vanished:  # a quiet tick has no log to store
            self.context.log.info(text)
        return dg.SensorResult(
            asset_events=[*self.events, *self.reported],
            cursor=encode_cursor(changes.cursor, polled_at, self.interval_seconds),
            skip_reason=dg.SkipReason(text),
        )

    def _changes(self, cursor: "FleetCursor", layout: Layout | None) -> "FleetChanges":
        from arroyo_dagster.state.operations.catalog.changes import (
            FleetCursor,
            NothingLeft,
            PollOptions,
            poll_fleet,
        )

        options = PollOptions(
            newest=1,
            most=self.options.events,
            layout=layout,
            sweep=sweep(self.interval_seconds),
        )
        try:
            return poll_fleet(self.store, cursor, options, deadline=self.deadline)
        except NothingLeft:
            if self.keys:
                raise
            return poll_fleet(self.store, FleetCursor(), options, deadline=self.deadline)

    def _cursor(self) -> "FleetCursor":
        try:
            return decode_cursor(self.context.cursor)
        except InputError as error:
            self.context.log.warning(str(error))
            return decode_cursor(None)

    def _wait_seconds(self, cursor: "FleetCursor") -> int:
        """Return the time until the next poll; 0 if jobs were left, or if Dagster waits itself."""
        polled_at = decode_poll(self.context.cursor)[0]
        by_dagster = self.options.interval_seconds or TICK_SECONDS
        if self.interval_seconds <= by_dagster or polled_at is None or cursor.start_from:
            return 0
        passed = wall_clock() // 1_000_000 - polled_at
        # Dagster's ticks jitter. A clock that went back delays nothing.
        wait = self.interval_seconds - passed
        return wait if passed >= 0 and wait > _JITTER_SECONDS else 0

    # ---- events ----------------------------------------------------------------------------------

    def _report(self, job: "JobChanges", before: int) -> None:
        if not job.checkpoints:
            return
        self.advanced.append(job.paths)
        key, checkpoint = self.keys.get(job.paths.root), job.checkpoints[-1]
        if key is None:
            if job.paths.root not in self.names.pipelines.keys:  # else it is called gone
                self.unknown.append(job.paths.root)
        elif not self._has(key, checkpoint):
            # Epochs may have expired before they were seen; a job that began anew counts from 1.
            new = int(checkpoint.epoch) - before if before else 0
            count = len(job.checkpoints) + job.passed_over
            self.events.append(self._event(key, job, checkpoint, max(new, count)))

    def _newest_events(
        self, changes: "FleetChanges"
    ) -> dict[dg.AssetKey, dg.AssetMaterialization | None]:
        """Return the newest event of each pipeline with new epochs, by one query for all."""
        roots = [job.paths.root for job in changes.jobs if job.checkpoints]
        keys = [self.keys[root] for root in roots if root in self.keys]
        records = self.context.instance.get_asset_records(keys) if keys else []
        entries = [record.asset_entry for record in records]
        return {
            entry.asset_key: entry.last_materialization.asset_materialization
            for entry in entries
            if entry.last_materialization is not None
        }

    def _has(self, key: dg.AssetKey, checkpoint: Checkpoint) -> bool:
        """Whether the instance has the event of an epoch: a tick cut short is repeated."""
        reported = self.newest.get(key)
        if reported is None or (reported.tags or {}).get(DATA_VERSION) != data_version(checkpoint):
            return False
        # A job that began anew under its name counts from 1 again, so the time counts as well.
        finished = reported.metadata.get(FIGURES["finished_micros"])
        return finished is not None and finished.value == checkpoint.finish_time_micros

    def _event(
        self, key: dg.AssetKey, job: "JobChanges", checkpoint: Checkpoint, new_epochs: int
    ) -> dg.AssetMaterialization:
        before = None if job.before is None or job.passed_over else frozenset(job.before.paths)
        amounts = epoch_figures(checkpoint, before, self._facts(job, checkpoint))
        metadata = checkpoint_metadata(checkpoint, amounts) | {"arroyo/new_epochs": new_epochs}
        if self.options.source_rates:
            metadata |= known({"sources": self._sources(job.paths)})
        page = self.resource.arroyo_page(job.paths, managed=checkpoint.progress is not None)
        if page is not None:
            metadata["Arroyo"] = page
        return dg.AssetMaterialization(
            key,
            description=f"epoch {checkpoint.epoch} of {job.paths.root} is ready",
            tags={DATA_VERSION: data_version(checkpoint)},
            metadata=metadata,
        )

    def _sources(self, paths: JobPaths) -> Any:
        """Return the positions of sources and their rates as a table, what stands still first."""
        from arroyo_dagster.state.operations.query.sql import SqlCatalog
        from arroyo_dagster.state.operations.query.state import open_state

        catalog = SqlCatalog(open_state(self.store))
        try:
            rows = catalog.saved("offsets", str(paths.root), {"epochs": str(_EPOCHS)}).to_dicts()
        except ArroyoStateError as error:
            self.context.log.warning(f"{paths.root}: sources are left out: {error}")
            return None
        return table(
            {
                "operator": row["operator"],
                "partition": row["partition"],
                "position": number(row["position"]),
                "a second": None if row["per_second"] is None else f"{row['per_second']:,.1f}",
                "state": row["status"],
            }
            for row in sorted(rows, key=lambda row: row["status"] != "stands still")
        )

    def _facts(self, job: "JobChanges", checkpoint: Checkpoint) -> Mapping[Any, Any]:
        if len(set(checkpoint.paths)) > self.options.files_per_job:
            return {}
        try:
            return self.footers.read(
                self.store, sorted(set(checkpoint.paths)), deadline=self.deadline
            )
        except ArroyoStateError as error:
            self.context.log.warning(f"{job.paths.root}: bytes and rows are left out: {error}")
            return {}

    def _report_states(self) -> None:
        """A state of a dataflow that cannot be read is told of in words: its job is seen anyhow."""
        if self.states is None:
            return
        try:
            self.reported.extend(
                self.states.events(self.context.instance, self.store, self.advanced)
            )
        except ArroyoStateError as error:
            self.context.log.warning(f"states are not reported: {error}")

    # ---- the rest --------------------------------------------------------------------------------

    def _warn(self, before: "FleetCursor", changes: "FleetChanges") -> None:
        for job in changes.jobs:
            for problem in job.problems:
                self.context.log.warning(f"{job.paths.root} cannot be read: {problem}")
        for problem in changes.problems:
            self.context.log.warning(str(problem))
        for paths in changes.vanished[:_NAMED]:
            last = before.positions[paths].epoch or "none"
            self.context.log.warning(
                f"{paths.root} vanished; its last epoch was {last}. Next: restore its objects; "
                "if it was deleted on purpose, name it under `gone`"
            )

    def _requests_made(self) -> Requests:
        calls = self.store.calls
        lists = calls["list"] + calls["list_dir"]
        return Requests(lists, calls.total() - lists)

    def _format_tick(self, changes: "FleetChanges") -> str:
        unreadable = {
            job.paths.root: job.problems[0].message for job in changes.jobs if job.problems
        }
        parts = [
            f"new epochs of {len(self.advanced)} of {counted(changes.known, 'job')}",
            f"{counted(len(self.reported), 'event')} of dataflows" if self.reported else "",
            _list("unknown to the definitions, which a reload finds", self.unknown),
            f"{counted(changes.left, 'job')} left for the next tick" if changes.left else "",
            _list("vanished", [paths.root for paths in changes.vanished]),
            _list("unreadable", [f"{name} ({why})" for name, why in unreadable.items()]),
            _list("not listed", [problem.message for problem in changes.problems]),
            _list("names that no store can write", [repr(path) for path in changes.unlisted]),
            f"requests: {self._requests_made()}",
        ]
        return "; ".join(filter(None, parts))


def _list(what: str, names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return f"{what}: {', '.join(names[:_NAMED])}{more}" if names else ""


# ---- what an event says --------------------------------------------------------------------------


def data_version(checkpoint: Checkpoint) -> str:
    """Return `g{generation}:e{epoch}`: epochs of two worker generations never compare equal."""
    return f"g{checkpoint.worker_generation or 0}:e{checkpoint.epoch}"


def checkpoint_metadata(checkpoint: Checkpoint, amounts: EpochFigures) -> dict[str, Any]:
    """Return what is shown of one epoch: numbers, which Dagster plots, without unknown ones."""
    finished, watermark = checkpoint.finish_time_micros, job_watermark_micros(checkpoint)
    return known(
        {
            FIGURES["epoch"]: int(checkpoint.epoch),
            FIGURES["rows"]: amounts.rows,
            FIGURES["files"]: amounts.files,
            FIGURES["size_bytes"]: amounts.size_bytes,
            "arroyo/checkpoint_seconds": (finished - checkpoint.start_time_micros) / 1e6,
            "arroyo/watermark_lag_seconds": None
            if watermark is None
            else (finished - watermark) / 1e6,
            "finished at": timestamp(finished),
            "operators": table(_operator_rows(checkpoint)),
            FIGURES["new_files"]: amounts.new_files,
            FIGURES["new_size_bytes"]: amounts.new_size_bytes,
            FIGURES["started_micros"]: checkpoint.start_time_micros,
            FIGURES["finished_micros"]: finished,
            FIGURES["watermark_micros"]: watermark,
            FIGURES["worker_generation"]: checkpoint.worker_generation,
            TABLES: tables_metadata(amounts) if amounts.rows is not None else None,
            "arroyo/path": dg.MetadataValue.path(str(checkpoint.ref)),
        }
    )


def _operator_rows(checkpoint: Checkpoint) -> Iterator[Mapping[str, Any]]:
    """Yield a row for each table of the operators; one for an operator without tables."""
    for operator in checkpoint.operators:
        files = {name: len(table.paths) for name, table in operator.tables.items()}
        for name in [str(name) for name in operator.configs] or ["-"]:
            yield {
                "operator": str(operator.operator),
                "table": name,
                "files": files.get(TableName(name), 0),
                "subtasks": operator.parallelism,
                "watermark": time_of_day(operator.min_watermark_micros),
            }


# ---- the cursor ----------------------------------------------------------------------------------


def encode_cursor(
    cursor: "FleetCursor", polled_at: int | None = None, interval_seconds: int | None = None
) -> str:
    """Encode the cursor as short JSON, because every tick's row holds a copy.

    Args:
        polled_at: when the poll began, in seconds since 1970.
        interval_seconds: the time between two polls.
    """
    positions = {
        paths.root: [position.epoch]
        if position.worker_generation is None
        else [position.epoch, position.worker_generation]
        for paths, position in cursor.positions.items()
    }
    others = {
        "n": cursor.start_from,
        "u": sorted(paths.root for paths in cursor.unread) or None,
        "r": cursor.listed_to,
        "t": polled_at,
        "i": interval_seconds,
    }
    document = {"v": CURSOR_VERSION, "s": positions, **known(others)}
    return json.dumps(document, separators=(",", ":"), sort_keys=True)


def decode_cursor(text: str | None) -> "FleetCursor":
    """Read a cursor; an empty one if there is none.

    Raises:
        InputError: this package did not write it, or a later release did; the tick starts over.
    """
    from arroyo_dagster.state.operations.catalog.changes import FleetCursor
    from arroyo_dagster.state.operations.catalog.jobs import paths_of

    if not text:
        return FleetCursor()
    try:
        document = parse_json(text)
        if document["v"] != CURSOR_VERSION:
            raise ValueError(f"version {document['v']}")
        # One entry that cannot be read is of a new job: it must not hide the others.
        positions = dict(filter(None, itertools.starmap(_position, document["s"].items())))
        start, listed_to = document.get("n"), document.get("r")
        return FleetCursor(
            positions=positions,
            unread=frozenset(paths_of(root) for root in document.get("u", ())),
            start_from=None if start is None else str(start),
            listed_to=None if listed_to is None else str(listed_to),
        )
    except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        raise InputError(
            f"the sensor's cursor cannot be read ({error!r}): the sensor starts over, with the "
            "newest epoch of each job",
            next_step="nothing to do; `dagster sensor cursor` shows and sets it",
        ) from error


def decode_poll(text: str | None) -> tuple[int | None, int | None]:
    """Return when the last poll began, in seconds since 1970, and its interval; None = unknown."""
    try:
        document = parse_json(text or "{}")
        return document.get("t"), document.get("i")
    except (ValueError, AttributeError):  # the tick says that it starts over
        return None, None


def _position(root: str, numbers: Sequence[int]) -> "tuple[JobPaths, JobPosition] | None":
    from arroyo_dagster.state.operations.catalog.job_changes import JobPosition
    from arroyo_dagster.state.operations.catalog.jobs import paths_of

    try:
        return paths_of(root), JobPosition(_generation(root, *numbers[1:]), Epoch(int(numbers[0])))
    except (ValueError, TypeError, IndexError):
        return None


def _generation(root: str, *numbers: int) -> WorkerGeneration | None:
    if ("/" in root) != (len(numbers) == 1):
        raise ValueError(f"{root!r} has {len(numbers)} generations")
    return WorkerGeneration(int(numbers[0])) if numbers else None
