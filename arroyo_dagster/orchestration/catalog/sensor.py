"""The sensor that reports newly ready epochs of every job, one event each.

Events are stored before the cursor moves, so a daemon that is killed in between repeats a tick.
Events that the instance already has are skipped: none is duplicated or lost.
"""

import itertools
import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import dagster as dg

from arroyo_dagster.errors import ArroyoStateError, InputError, NotFoundError
from arroyo_dagster.orchestration.dataflow.assets import StatesReport
from arroyo_dagster.orchestration.partitions import job_at, job_of, key_error, usable_keys
from arroyo_dagster.orchestration.rendering import (
    DATA_VERSION,
    content,
    counted,
    duration,
    known,
    timestamp,
)
from arroyo_dagster.orchestration.resources import ArroyoStateStore
from arroyo_dagster.orchestration.translator import CHECKPOINT, Naming
from arroyo_dagster.state.model.checkpoints import Checkpoint
from arroyo_dagster.state.model.clock import wall_clock
from arroyo_dagster.state.model.ids import Epoch, WorkerGeneration
from arroyo_dagster.state.model.json_fields import parse_json
from arroyo_dagster.state.model.layout import JobPaths, Layout
from arroyo_dagster.state.planning.polling import (
    TICK_SECONDS,
    Requests,
    poll_interval_seconds,
    sweep,
)
from arroyo_dagster.state.planning.restore.reads import job_watermark_micros
from arroyo_dagster.state.planning.verify.checks import Figures, figures

if TYPE_CHECKING:
    from arroyo_dagster.state.operations.catalog.changes import FleetChanges, FleetCursor
    from arroyo_dagster.state.operations.catalog.footers import Footers
    from arroyo_dagster.state.operations.catalog.job_changes import JobChanges, JobPosition

CURSOR_VERSION = 1
FINISHED = "arroyo/finished_at"
_NAMED = 10
_JITTER_SECONDS = 5
_RECORDS = 1000
_Identity = tuple[str | None, object]


@dataclass(frozen=True, kw_only=True)
class SensorOptions:
    """How much one tick does.

    Attributes:
        interval_seconds: the minimum time between two polls; None = 30 to 300 seconds, by the
            number of jobs.
        epochs_per_job: the maximum number of newest epochs of a job that get an event each; the
            first of them carries the number of older ones.
        events: the maximum number of events; remaining jobs are not read, and come first in the
            next tick, which is not delayed.
        budget_seconds: nothing is started after it; Dagster ends a tick at 60.
        files_per_job: for a job with more files, bytes and rows are left out.
    """

    interval_seconds: int | None = None
    epochs_per_job: int = 10
    events: int = 200
    budget_seconds: float = 20.0
    files_per_job: int = 256


def build_checkpoint_sensor(
    naming: Naming,
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
            these, and on the checkpoint.
    """
    chosen = options or SensorOptions()
    footers: list[Footers] = []  # lives as long as the code server: no footer is read twice

    @dg.sensor(
        name=naming.name("arroyo_checkpoint_sensor"),
        asset_selection=dg.AssetSelection.assets(naming.key(CHECKPOINT), *state_keys),
        minimum_interval_seconds=chosen.interval_seconds or TICK_SECONDS,
        default_status=sensor_status(running),
        description="Report newly ready epochs of every job below the checkpoint URL.",
    )
    @naming.bind
    def arroyo_checkpoint_sensor(
        context: dg.SensorEvaluationContext, arroyo_store: ArroyoStateStore
    ) -> dg.SensorResult:
        from arroyo_dagster.state.operations.catalog.footers import Footers

        if not footers:
            footers.append(Footers())
        tick = _Tick(context, arroyo_store, naming, chosen, footers[0], states)
        return tick.result(arroyo_store.chosen_layout())

    return arroyo_checkpoint_sensor


def sensor_status(running: bool) -> dg.DefaultSensorStatus:
    """Return RUNNING or STOPPED. The default is STOPPED: installing starts nothing."""
    return dg.DefaultSensorStatus.RUNNING if running else dg.DefaultSensorStatus.STOPPED


# ---- one tick ------------------------------------------------------------------------------------


@dataclass
class _Tick:
    context: dg.SensorEvaluationContext
    resource: ArroyoStateStore
    naming: Naming
    options: SensorOptions
    footers: "Footers"
    states: StatesReport | None = None
    events: list[dg.AssetMaterialization] = field(default_factory=list)
    reported: list[dg.AssetMaterialization] = field(default_factory=list)
    advanced: list[str] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    recorded: dict[str, set[_Identity]] = field(default_factory=dict)

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
            if self.context.cursor or self._keys():
                raise
            return dg.SensorResult(
                skip_reason=dg.SkipReason(f"the checkpoint URL holds no jobs yet: {error}")
            )
        self._fetch_recorded(changes)
        for job in changes.jobs:
            self._report(job)
        self._report_states()
        self._warn(cursor, changes)
        self._remember(cursor, changes.vanished)
        told = self._format_tick(changes)
        if self.events or self.reported or changes.vanished:  # a quiet tick has no log to store
            self.context.log.info(told)
        return dg.SensorResult(
            asset_events=[*self.events, *self.reported],
            cursor=encode_cursor(changes.cursor, polled_at, self.interval_seconds),
            dynamic_partitions_requests=self._requests(changes),
            skip_reason=dg.SkipReason(told),
        )

    def _changes(self, cursor: "FleetCursor", layout: Layout | None) -> "FleetChanges":
        from arroyo_dagster.state.operations.catalog.changes import (
            FleetCursor,
            NothingLeft,
            PollOptions,
            poll_fleet,
        )

        options = PollOptions(
            newest=min(self.options.epochs_per_job, self.options.events),
            most=self.options.events,
            layout=layout,
            sweep=sweep(self.interval_seconds),
        )
        try:
            return poll_fleet(self.store, cursor, options, deadline=self.deadline)
        except NothingLeft:
            if not self._all_acknowledged(cursor):
                raise
            return poll_fleet(self.store, FleetCursor(), options, deadline=self.deadline)

    def _all_acknowledged(self, cursor: "FleetCursor") -> bool:
        """Whether all jobs that were known may be gone; their last epochs are kept."""
        from arroyo_dagster.state.operations.catalog import known_jobs

        catalogue = self.resource.catalogue()
        gone = known_jobs.acknowledged(self.store, catalogue, cursor.positions)
        others = [paths for paths in cursor.positions if paths not in gone]
        self._remember(cursor, others)
        return not others

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

    def _report(self, job: "JobChanges") -> None:
        key = job.paths.root
        problem = key_error(key)
        if problem is not None:
            self.refused[key] = problem
            return
        if not job.checkpoints:
            return
        reported = self._reported_already(key)
        fresh = [one for one in job.checkpoints if _identity(one) not in reported]
        if fresh:
            self.advanced.append(key)
            self.events.extend(self._events(job, fresh))

    def _report_states(self) -> None:
        """A state of a dataflow that cannot be read is told of in words: its job is seen anyhow."""
        if self.states is None:
            return
        jobs = [job_of(key) for key in self.advanced]
        try:
            self.reported.extend(self.states.events(self.context.instance, self.store, jobs))
        except ArroyoStateError as error:
            self.context.log.warning(f"states are not reported: {error}")

    def _reported_already(self, key: str) -> set[_Identity]:
        """The epochs of a job that the instance has: a tick cut short is repeated."""
        if key in self.recorded:
            return self.recorded[key]
        return self._stored_events([key], self.options.epochs_per_job)[0][key]

    def _fetch_recorded(self, changes: "FleetChanges") -> None:
        """Fetch the events of all new jobs by one query: a first import has hundreds of them."""
        new = [job.paths.root for job in changes.jobs if job.appeared and job.checkpoints]
        keys = [key for key in new if key_error(key) is None]
        if not keys:
            return
        limit = min(_RECORDS, self.options.epochs_per_job * len(keys))
        events, more = self._stored_events(keys, limit)
        if not more:  # otherwise older events of some are missing, and each has a query
            self.recorded = events

    def _stored_events(
        self, keys: Sequence[str], limit: int
    ) -> tuple[dict[str, set[_Identity]], bool]:
        """Return the newest events by job, and whether there may be more."""
        found = self.context.instance.fetch_materializations(
            dg.AssetRecordsFilter(self.naming.key(CHECKPOINT), asset_partitions=list(keys)),
            limit=limit,
        )
        events: dict[str, set[_Identity]] = {key: set() for key in keys}
        for record in found.records:
            event = record.asset_materialization
            if event is not None and event.partition is not None:
                identity = ((event.tags or {}).get(DATA_VERSION), event.metadata.get(FINISHED))
                events[event.partition].add(identity)
        return events, found.has_more

    def _events(
        self, job: "JobChanges", fresh: Sequence[Checkpoint]
    ) -> Iterable[dg.AssetMaterialization]:
        facts = self._facts(job, fresh)
        earlier = {
            later.ref: one
            for one, later in zip([job.before, *job.checkpoints], job.checkpoints, strict=False)
        }
        for at, checkpoint in enumerate(fresh):
            before = earlier[checkpoint.ref]
            paths = None if before is None else set(before.paths)
            metadata = checkpoint_metadata(checkpoint, figures(checkpoint, paths, facts))
            managed = checkpoint.progress is not None
            page = self.resource.arroyo_page(job.paths, managed=managed)
            if page is not None:
                metadata["Arroyo"] = page
            if at == 0 and job.passed_over:
                metadata["arroyo/older_epochs"] = job.passed_over
            yield dg.AssetMaterialization(
                self.naming.key(CHECKPOINT),
                description=f"epoch {checkpoint.epoch} of {job.paths.root} is ready",
                partition=job.paths.root,
                tags={DATA_VERSION: data_version(checkpoint)},
                metadata=metadata,
            )

    def _facts(self, job: "JobChanges", fresh: Sequence[Checkpoint]) -> Mapping[Any, Any]:
        wanted = {path for checkpoint in fresh for path in checkpoint.paths}
        if len(wanted) > self.options.files_per_job:
            return {}
        try:
            return self.footers.read(self.store, sorted(wanted), deadline=self.deadline)
        except ArroyoStateError as error:
            self.context.log.warning(f"{job.paths.root}: bytes and rows are left out: {error}")
            return {}

    # ---- the rest --------------------------------------------------------------------------------

    def _requests(self, changes: "FleetChanges") -> list[dg.AddDynamicPartitionsRequest]:
        have = self._keys()
        every = usable_keys(paths.root for paths in changes.cursor.positions)
        new = [key for key in dict.fromkeys([*self.advanced, *every]) if key not in have]
        # The daemon looks each of them up: a first import of thousands takes a few ticks.
        bounded = new[: max(self.options.events, len(self.advanced))]
        return [self.naming.jobs.build_add_request(bounded)] if bounded else []

    def _keys(self) -> set[str]:
        return set(self.context.instance.get_dynamic_partitions(str(self.naming.jobs.name)))

    def _remember(self, cursor: "FleetCursor", gone: Iterable[JobPaths]) -> None:
        """Keep the last epochs of jobs that vanished: the next cursor does not hold them."""
        from arroyo_dagster.state.operations.catalog.known_jobs import remember

        last = [(paths, cursor.positions[paths].epoch or None) for paths in gone]
        if last:
            remember(self.resource.catalogue(), last, wall_clock())

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
                "if it was deleted on purpose, run the job "
                f"{self.naming.name('arroyo_forget_job')}"
            )

    def _requests_made(self) -> Requests:
        calls = self.store.calls
        lists = calls["list"] + calls["list_dir"]
        return Requests(lists, calls.total() - lists)

    def _format_tick(self, changes: "FleetChanges") -> str:
        appeared = [job.paths.root for job in changes.jobs if job.appeared]
        unreadable = {
            job.paths.root: job.problems[0].message for job in changes.jobs if job.problems
        }
        left = changes.left
        said = [
            f"{counted(len(self.events), 'new epoch')} of {len(self.advanced)} of "
            f"{counted(changes.known, 'job')}",
            f"{counted(len(self.reported), 'event')} of dataflows" if self.reported else "",
            _list("appeared", appeared),
            f"{counted(left, 'job')} left for the next tick" if left else "",
            _list("vanished", [paths.root for paths in changes.vanished]),
            _list("unreadable", [f"{name} ({why})" for name, why in unreadable.items()]),
            _list("not listed", [problem.message for problem in changes.problems]),
            _list("names that no store can write", [repr(path) for path in changes.unlisted]),
            _list("no partition", [f"{name!r} ({why})" for name, why in self.refused.items()]),
            f"requests: {self._requests_made()}",
        ]
        return "; ".join(part for part in said if part)


def _list(what: str, names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return f"{what}: {', '.join(names[:_NAMED])}{more}" if names else ""


# ---- what an event says --------------------------------------------------------------------------


def data_version(checkpoint: Checkpoint) -> str:
    """Return `g{generation}:e{epoch}`: epochs of two worker generations never compare equal."""
    return f"g{checkpoint.worker_generation or 0}:e{checkpoint.epoch}"


def _identity(checkpoint: Checkpoint) -> tuple[str, object]:
    # A job that began anew under its name counts from 1 again, so the time counts as well.
    return data_version(checkpoint), timestamp(checkpoint.finish_time_micros)


def checkpoint_metadata(checkpoint: Checkpoint, found: Figures) -> dict[str, Any]:
    """Return what is shown of one epoch; unknown values are left out."""
    taken = checkpoint.finish_time_micros - checkpoint.start_time_micros
    return known(
        {
            "arroyo/epoch": checkpoint.epoch,
            "size": content(found.size_bytes, found.files, found.rows),
            "new": content(found.new_size_bytes, found.new_files, None),
            FINISHED: timestamp(checkpoint.finish_time_micros),
            "arroyo/watermark": timestamp(job_watermark_micros(checkpoint)),
            "duration": duration(taken),
            "arroyo/operators": len(checkpoint.operators),
            "arroyo/generation": checkpoint.worker_generation,
            "arroyo/path": dg.MetadataValue.path(str(checkpoint.ref)),
        }
    )


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
        paths.root: [one.epoch]
        if one.worker_generation is None
        else [one.epoch, one.worker_generation]
        for paths, one in cursor.positions.items()
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
            unread=frozenset(job_at(root) for root in document.get("u", ())),
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

    try:
        return job_at(root), JobPosition(_generation(root, *numbers[1:]), Epoch(int(numbers[0])))
    except (ValueError, TypeError, IndexError):
        return None


def _generation(root: str, *numbers: int) -> WorkerGeneration | None:
    if ("/" in root) != (len(numbers) == 1):
        raise ValueError(f"{root!r} has {len(numbers)} generations")
    return WorkerGeneration(int(numbers[0])) if numbers else None
