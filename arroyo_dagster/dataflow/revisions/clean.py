"""Remove stored states of a dataflow, and let it read topics from their beginning again.

Nothing is deleted: each service publishes an epoch without the rows, and the epoch before stays
pinned. Until the service runs again, `restore` makes that epoch the newest one.

Source: sdf-states.md 1.11 (`sdf clean`). Differs: SDF deletes at once. The decision
`sdf-changed-states.md`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from arroyo_dagster.dataflow.definition.definition import Dataflow
from arroyo_dagster.dataflow.errors import did_you_mean
from arroyo_dagster.dataflow.revisions.content import RevisedTables
from arroyo_dagster.dataflow.revisions.stored import StoredService, read_stored
from arroyo_dagster.dataflow.storage.engine_tables import DROPPED
from arroyo_dagster.dataflow.storage.state_tables import FLUSHED
from arroyo_dagster.dataflow.topics.replay import LETTER_MEMBERS
from arroyo_dagster.dataflow.topics.segments import FROM, offset_behind
from arroyo_dagster.dataflow.views.namespaces import OFFSETS, SOURCES, stored_pairs
from arroyo_dagster.dataflow.views.snapshots import FLUSH, STATES
from arroyo_dagster.dataflow.views.view import service_paths
from arroyo_dagster.engine.source_state import source_tables
from arroyo_dagster.errors import InputError, NotFoundError
from arroyo_dagster.state.metadata.backend import ParquetBackend
from arroyo_dagster.state.metadata.tree import CheckpointTree
from arroyo_dagster.state.model.checkpoints import Checkpoint
from arroyo_dagster.state.model.clock import Clock, wall_clock
from arroyo_dagster.state.model.ids import Epoch, OperatorId, TableName
from arroyo_dagster.state.model.layout import JobPaths
from arroyo_dagster.state.operations.restore.revision import (
    BEFORE_CLEAN,
    RevisedContent,
    RevisionWriter,
    publish_revision,
    restore_revised,
)
from arroyo_dagster.state.planning.restore.reads import is_at_rest
from arroyo_dagster.state.storage.store import ObjectStore

ALL = "all"
"""Instead of a topic: every topic that no service of the dataflow writes."""

_SINKS = "sink."
_STDIN, _SPARK = "segment", "batch"
"""Members of the offsets of topics whose records cannot be read again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CleanOptions:
    """What to remove. Without states and topics: everything that is stored of the services.

    Attributes:
        service: only this service; None = all.
        states: `state` or `service/state`; also states that are no longer declared.
        topics: the topics that are read from their beginning again, or `all`.
    """

    service: str | None = None
    states: tuple[str, ...] = ()
    topics: tuple[str, ...] = ()

    @property
    def everything(self) -> bool:
        """Whether whole services are cleaned."""
        return not (self.states or self.topics)


@dataclass(frozen=True, slots=True, kw_only=True)
class CleanedState:
    """A stored state whose rows are removed. `dropped`: it is no longer declared."""

    name: str
    rows: int
    dropped: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceClean:
    """What is removed of one service.

    Attributes:
        stored: the service at the epoch that stays pinned.
        states: the states whose rows are removed.
        topics: the topics that are read from their beginning again.
        offsets: the offsets of the topics afterwards; None = unchanged.
        everything: whether event time, windows and counters are removed, too.
        may_be_running: whether its newest run did not end with a last epoch.
        warnings: what the user should know before.
    """

    stored: StoredService
    states: tuple[CleanedState, ...]
    topics: tuple[str, ...]
    offsets: Mapping[str, Any] | None
    everything: bool
    may_be_running: bool
    warnings: tuple[str, ...]

    @property
    def service(self) -> str:
        """The name of the service."""
        return self.stored.name


def plan_clean(dataflow: Dataflow, store: ObjectStore, options: CleanOptions) -> list[ServiceClean]:
    """Return what is removed, by service. Writes nothing: this is the dry run.

    Services without an epoch are left out; so are those that a clean has emptied already.

    Raises:
        InputError: there is no such service, state or topic; or a topic cannot be read again.
        CheckpointError: the newest epoch of a service cannot be read (E51).
    """
    names = _services(dataflow, store)
    if options.service is not None and options.service not in names:
        raise InputError(
            f"the dataflow has no service `{options.service}`"
            + did_you_mean(options.service, names),
            services=names,
        )
    chosen = names if options.service is None else [options.service]
    read = [read_stored(store, dataflow, name) for name in chosen]
    stored = {service.name: service for service in read if service is not None}
    states = _chosen_states(stored, options.states)
    topics = _chosen_topics(dataflow, stored, options.topics)
    heads = {service.name: _last_written(service.head) for service in stored.values()}
    found = []
    for name, service in stored.items():
        everything = options.everything
        cleaned = _every_state(service) if everything else states.get(name, ())
        again = tuple(_offsets(service)["topics"]) if everything else topics.get(name, ())
        whole = options.service is None
        plan = _service_clean(
            service, cleaned, again, heads if whole else {}, everything=everything
        )
        if plan is not None:
            found.append(plan)
    return found


def _last_written(head: Checkpoint) -> Epoch:
    """Return the newest epoch that may have records: a revision has none."""
    revised = None if head.progress is None else head.progress.revises
    return head.epoch if revised is None else revised


def _services(dataflow: Dataflow, store: ObjectStore) -> list[str]:
    """Return the services of the definition, and others of which something is stored."""
    try:
        listed = [path.name for path in store.list_dir(dataflow.pipeline).prefixes]
    except NotFoundError:
        listed = []
    return sorted({*dataflow.services, *listed})


def _every_state(stored: StoredService) -> tuple[CleanedState, ...]:
    return tuple(
        CleanedState(name=name, rows=stored.rows(name, dropped=dropped), dropped=dropped)
        for dropped, schemas in ((False, stored.schemas), (True, stored.dropped))
        for name in sorted(schemas)
    )


def _chosen_states(
    stored: Mapping[str, StoredService], wanted: Sequence[str]
) -> dict[str, tuple[CleanedState, ...]]:
    known = {
        f"{name}/{state}": (name, state, dropped)
        for name, service in stored.items()
        for dropped, schemas in ((True, service.dropped), (False, service.schemas))
        for state in schemas
    }
    found: dict[str, list[CleanedState]] = {}
    for text in dict.fromkeys(wanted):
        named = text.replace(".", "/", 1) if "/" not in text else text
        matches = [known[named]] if named in known else []
        matches = matches or [entry for entry in known.values() if entry[1] == text]
        if len(matches) != 1:
            raise InputError(
                f"{len(matches) or 'no'} stored state{'s are' if matches else ' is'} named "
                f"`{text}`" + did_you_mean(text, {*known, *(entry[1] for entry in known.values())}),
                states=sorted(known),
                next_step="name it as SERVICE/STATE",
            )
        ((service, state, dropped),) = matches
        rows = stored[service].rows(state, dropped=dropped)
        found.setdefault(service, []).append(CleanedState(name=state, rows=rows, dropped=dropped))
    return {service: tuple(states) for service, states in found.items()}


def _chosen_topics(
    dataflow: Dataflow, stored: Mapping[str, StoredService], wanted: Sequence[str]
) -> dict[str, tuple[str, ...]]:
    read = {name: tuple(_offsets(service)["topics"]) for name, service in stored.items()}
    written = {end.id for service in dataflow.services.values() for end in service.sinks if end.id}
    known = {topic for topics in read.values() for topic in topics}
    for topic in wanted:
        if topic != ALL and topic not in known:
            raise InputError(
                f"no service has read a topic `{topic}`" + did_you_mean(topic, known),
                topics=sorted(known),
            )
        if topic in written:
            raise InputError(
                f"topic `{topic}` cannot be read again: its records are deleted after they were "
                "read",
                next_step=f"let the service that writes it read again: --offsets {ALL}",
            )
    return {
        name: tuple(topic for topic in topics if topic not in written and {ALL, topic} & {*wanted})
        for name, topics in read.items()
    }


def _service_clean(
    stored: StoredService,
    states: tuple[CleanedState, ...],
    topics: tuple[str, ...],
    heads: Mapping[str, Epoch],
    *,
    everything: bool,
) -> ServiceClean | None:
    before = _offsets(stored)
    windowed = any(bool(json.loads(text).get("windowed")) for text in stored.schemas.values())
    if topics and windowed and not everything:
        raise InputError(
            f"service `{stored.name}` has windows: records that it reads again are late for them",
            topics=topics,
            next_step=f"clean the whole service: --service {stored.name}",
        )
    after = {
        topic: _again(topic, offset, stored, heads) if topic in topics else offset
        for topic, offset in before["topics"].items()
    }
    changed = after != before["topics"]
    if not states and not changed and not (everything and _has_more(stored.head)):
        return None
    paths = JobPaths(stored.head.job, stored.head.pipeline)
    generation = CheckpointTree(stored.store, paths).fence()
    return ServiceClean(
        stored=stored,
        states=states,
        topics=tuple(
            topic
            for topic in topics
            if after[topic] != before["topics"][topic] and after[topic].keys() <= {*LETTER_MEMBERS}
        ),
        offsets=after if changed else None,
        everything=everything,
        may_be_running=not is_at_rest(stored.head, generation),
        warnings=tuple(_warnings(stored, states, topics)),
    )


def _has_more(head: Checkpoint) -> bool:
    """Return whether an epoch has tables that a clean of a whole service removes."""
    return any(operator.tables and not _stays(operator.operator) for operator in head.operators)


def _stays(operator: OperatorId) -> bool:
    """Return whether a clean of a whole service keeps an operator: its source and its sinks.

    Sinks continue behind what they have written, which no clean takes back.
    """
    return operator == SOURCES or operator.startswith(_SINKS)


def _offsets(stored: StoredService) -> dict[str, Any]:
    pairs = stored_pairs(stored.store, stored.head, SOURCES, OFFSETS, str, str)
    return {"topics": {}, **{name: json.loads(text) for name, text in pairs.items()}}


def _again(
    topic: str, offset: Mapping[str, Any], stored: StoredService, heads: Mapping[str, Epoch]
) -> dict[str, Any]:
    """Return the offset from which a topic is read again.

    Its dead letters up to now are not replayed: their records are read again. Records between
    services go on behind those of the writer's newest epoch, as it writes them again; if the writer
    is not cleaned, where they were.
    """
    if offset.keys() <= {*LETTER_MEMBERS}:
        return dict(offset)  # it is read from its beginning already
    found = {name: value for name, value in offset.items() if name in (_STDIN, _SPARK)}
    for name, value in offset.items():
        writer = name.removeprefix(FROM)
        if name.startswith(FROM) and name not in LETTER_MEMBERS:
            found[name] = offset_behind(heads[writer]) if writer in heads else value
    if found:
        letters = {name: offset[name] for name in LETTER_MEMBERS if name in offset}
        return {**found, **letters}
    return {name: offset_behind(stored.head.epoch) for name in LETTER_MEMBERS}


def _warnings(
    stored: StoredService,
    states: Sequence[CleanedState],
    topics: Sequence[str],
) -> list[str]:
    found = []
    if states and not topics:
        found.append(
            "records that were read before do not count again; to read them again, add "
            f"--offsets {ALL}"
        )
    left = sorted({*stored.schemas} - {state.name for state in states if not state.dropped})
    if topics and left:
        found.append(f"records that are read again count twice in: {', '.join(left)}")
    if topics and any(operator.operator.startswith(_SINKS) for operator in stored.head.operators):
        found.append("output stays; what is read again is written again")
    known = _offsets(stored)["topics"]
    for topic in topics:
        if _STDIN in known[topic] or _SPARK in known[topic]:
            found.append(f"topic {topic} goes on where it is: its records cannot be read again")
    return found


# ---- execution -----------------------------------------------------------------------------------


def run_clean(
    dataflow: Dataflow,
    store: ObjectStore,
    plan: ServiceClean,
    *,
    owner: str = "sdf clean",
    clock: Clock = wall_clock,
) -> Epoch:
    """Publish an epoch of one service without what the plan removes, and return its number.

    A run that is alive is fenced. Interrupted at any point, the service is as before or cleaned.

    Raises:
        ConflictError: the service has written an epoch since the plan was made.
        ArroyoStateError: as of `publish_revision`.
    """
    return publish_revision(
        store,
        service_paths(dataflow, plan.service),
        plan.stored.head,
        partial(_cleaned, plan),
        reason=BEFORE_CLEAN,
        owner=owner,
        clock=clock,
    )


def _cleaned(plan: ServiceClean, base: Checkpoint, writer: RevisionWriter) -> RevisedContent:
    tables = RevisedTables(base)
    if plan.everything:
        for operator in base.operators:
            if not _stays(operator.operator):
                tables.drop(operator.operator)
    else:
        _remove_states(plan, tables, writer)
    if plan.offsets is None:
        return RevisedContent(tables.done())
    offsets = {**_offsets(plan.stored), "topics": dict(plan.offsets)}
    texts = {name: json.dumps(value, sort_keys=True) for name, value in offsets.items()}
    tables.put_pairs(OperatorId(SOURCES), source_tables()[TableName(OFFSETS)], texts, writer)
    assert base.progress is not None
    known = {**json.loads(base.progress.offsets), SOURCES: offsets}
    return RevisedContent(tables.done(), json.dumps(known, sort_keys=True))


def _remove_states(plan: ServiceClean, tables: RevisedTables, writer: RevisionWriter) -> None:
    for state in plan.states:
        for operator, name in ((STATES, state.name), (FLUSH, f"{state.name}{FLUSHED}")):
            tables.take(DROPPED if state.dropped else operator, name)
    for operator, schemas, dropped in (
        (STATES, plan.stored.schemas, False),
        (DROPPED, plan.stored.dropped, True),
    ):
        gone = {state.name for state in plan.states if state.dropped == dropped}
        if gone:
            kept = {name: text for name, text in schemas.items() if name not in gone}
            tables.put_schemas(operator, kept, writer)


# ---- undo ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceRestore:
    """A service whose newest epoch is a revision: a clean, or a migration.

    Attributes:
        head: the revision.
        restores: the epoch before, whose content it gets back.
    """

    service: str
    head: Checkpoint
    restores: Epoch


def plan_restore(
    dataflow: Dataflow, store: ObjectStore, service: str | None = None
) -> list[ServiceRestore]:
    """Return the services that can get back what they had before a clean or a migration.

    Raises:
        InputError: there is none.
        CheckpointError: the newest epoch of a service cannot be read (E51).
    """
    found = []
    for name in _services(dataflow, store) if service is None else [service]:
        stored = read_stored(store, dataflow, name)
        progress = None if stored is None else stored.head.progress
        if stored is None or progress is None or progress.revises is None:
            continue
        pinned = ParquetBackend(store, service_paths(dataflow, name)).job_pins().pinned
        if progress.revises in pinned:
            found.append(ServiceRestore(service=name, head=stored.head, restores=progress.revises))
    if not found:
        raise InputError(
            "nothing to undo: no service was cleaned or migrated since its last run",
            dataflow=dataflow.pipeline,
            next_step="epochs from before a clean stay pinned: `arroyo-state sql @pins JOB`; their "
            "rows: `arroyo-state rows JOB@N states STATE`",
        )
    return found


def run_restore(
    dataflow: Dataflow,
    store: ObjectStore,
    plan: ServiceRestore,
    *,
    owner: str = "sdf clean --undo",
    clock: Clock = wall_clock,
) -> Epoch:
    """Publish the content from before a clean or a migration, and return the new epoch.

    Raises:
        ConflictError: the service has run since.
        ArroyoStateError: as of `restore_revised`.
    """
    return restore_revised(
        store, service_paths(dataflow, plan.service), plan.head, owner=owner, clock=clock
    )
