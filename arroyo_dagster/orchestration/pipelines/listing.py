"""The list of pipelines, from what a store, Arroyo and the last list say.

A pipeline keeps its key for ever, and leaves the list only on proof: see `merged`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, count
from typing import TYPE_CHECKING, TypeVar

from arroyo_dagster.errors import ArroyoStateError
from arroyo_dagster.orchestration.pipelines.lineage import (
    End,
    endpoints_of,
    ends_of_arroyo,
    ends_of_endpoints,
    ends_of_managed,
    without_secrets,
)
from arroyo_dagster.orchestration.pipelines.model import (
    Key,
    ListedPipeline,
    PipelineList,
    is_key_of,
    key_part,
    with_id,
)

if TYPE_CHECKING:
    from arroyo_dagster.state.metadata.tree import CheckpointTree
    from arroyo_dagster.state.model.checkpoints import OperatorCheckpoint
    from arroyo_dagster.state.model.ids import Epoch
    from arroyo_dagster.state.model.job_facts import JobAnswer
    from arroyo_dagster.state.model.layout import JobPaths, Layout
    from arroyo_dagster.state.operations.catalog.job_directory import JobDirectory
    from arroyo_dagster.state.operations.catalog.jobs import JobListing
    from arroyo_dagster.state.storage.store import ObjectStore

_T = TypeVar("_T")
_NEWEST = 4
"""How many of the newest epochs are tried: the newest may not be finished yet."""
_MOST_NOTES = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class RootListing:
    """What the listing of a store shows.

    Attributes:
        roots: of the pipelines in it.
        problem: why it is not to be trusted; None = it is.
        notes: what could not be read.
    """

    url: str
    listed_at_micros: int
    roots: tuple[str, ...] = ()
    problem: str | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class EpochEnds:
    """What the newest epoch that could be read says of a pipeline."""

    epoch: int
    managed: bool
    ends: tuple[End, ...]
    operators: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What is known of one pipeline besides its root; None = not known this time.

    Attributes:
        name, sql: as Arroyo says.
        newest: None = also where the last list has read the newest epoch.
        deleted: the proof that Arroyo has deleted it.
    """

    name: str | None = None
    sql: str | None = field(default=None, repr=False)
    newest: EpochEnds | None = None
    deleted: str | None = None


NO_FACTS = Facts()


# ---- the rule ------------------------------------------------------------------------------------


def merged(
    last: PipelineList | None,
    listing: RootListing,
    facts: Mapping[str, Facts],
    gone: Collection[str] = (),
) -> PipelineList:
    """Return the list after a listing.

    * A listing with a problem changes nothing, nor does one that is empty while pipelines of the
      last list have not left.
    * A pipeline leaves if it is not in the listing and its deletion is proven, or `gone` has its
      root, its name or its key; or if it is in the listing and `gone` has its root.
    * A new pipeline gets the key of its name, or of its root if no name is known. It keeps it for
      ever. If another pipeline has or had this key, the id of its job is appended.
    * What is not known this time stays as it was.

    Args:
        last: None = there is none yet.
        facts: by root, of pipelines of the listing and of the last list.
        gone: what the user says is gone.
    """
    before = last or PipelineList(listing.url)
    listed = {root for root in listing.roots if root not in gone}
    kept = [
        pipeline
        for pipeline in before.pipelines
        if pipeline.root not in listed
        and facts.get(pipeline.root, NO_FACTS).deleted is None
        and pipeline.texts.isdisjoint(gone)
    ]
    problem = listing.problem
    if problem is None and not listing.roots and kept:
        problem = f"the listing shows no pipeline, and the last one showed {len(before.pipelines)}"
    if problem is not None:
        return replace(before, problem=problem)
    names = {root: _utf8(facts.get(root, NO_FACTS).name) for root in listed}
    keys = with_keys(before.keys, names)
    pipelines = dict(before.by_root) | {
        root: ListedPipeline(root, keys[root], name if is_key_of(keys[root][-1], name) else None)
        for root, name in names.items()
        if root not in before.by_root
    }
    current = [_with_facts(pipelines[root], facts.get(root, NO_FACTS)) for root in listed]
    return PipelineList(
        url=listing.url,
        pipelines=tuple(sorted([*kept, *current], key=lambda pipeline: pipeline.key)),
        keys=keys,
        listed_at_micros=listing.listed_at_micros,
        missing=tuple(sorted(pipeline.root for pipeline in kept)),
        notes=listing.notes,
    )


def with_keys(given: Mapping[str, Key], names: Mapping[str, str | None]) -> dict[str, Key]:
    keys = dict(given)
    taken = {*keys.values()}
    for root in sorted(names.keys() - keys.keys()):
        name = names[root]
        key = tuple(map(key_part, [name] if name else root.split("/")))
        ids = chain([root.rpartition("/")[2], root], (f"{root}/{number}" for number in count(2)))
        others = ((*key[:-1], with_id(key[-1], identity)) for identity in ids)
        keys[root] = next(candidate for candidate in chain([key], others) if candidate not in taken)
        taken.add(keys[root])
    return keys


def _with_facts(pipeline: ListedPipeline, facts: Facts) -> ListedPipeline:
    sql = pipeline.sql if facts.sql is None else _utf8(without_secrets(facts.sql))
    name = _utf8(facts.name) or pipeline.current_name
    new, newest = replace(pipeline, current_name=name, sql=sql), facts.newest
    if newest is not None:
        ends: tuple[End, ...] | None = newest.ends
        new = replace(new, managed=newest.managed, epoch=newest.epoch, operators=newest.operators)
    elif sql == pipeline.sql or pipeline.managed:
        return new  # its sources and sinks are as they were
    else:
        ends = None if pipeline.epoch is None else ends_of_endpoints(pipeline)
    sources, sinks = endpoints_of(pipeline.key, ends, sql)
    return replace(new, sources=sources, sinks=sinks)


def _utf8(text: str | None) -> str | None:
    """Return a text that a file can hold; None for none, and for an empty one."""
    return text.encode(errors="replace").decode() if text else None


# ---- reading -------------------------------------------------------------------------------------


def list_pipelines(
    store: ObjectStore,
    directory: JobDirectory | None,
    last: PipelineList | None,
    *,
    url: str,
    gone: Collection[str] = (),
    layout: Layout | None = None,
    within_seconds: float = 20.0,
    now_micros: int,
) -> PipelineList:
    """List the pipelines below a checkpoint URL; see `merged`. Raises no `ArroyoStateError`.

    It costs the listings above the data files, the answers of Arroyo for all jobs together, and a
    few small objects of each pipeline with a new epoch. What is not read in time is read by the
    next listing; if the listing itself is not done in time, it changes nothing.

    Args:
        directory: the sources of names, SQL and deletions; None = there are none.
        last: the last list. Of another URL, only its keys count.
        url: for display; without secrets.
        layout: of the pipelines; None = both.
    """
    until = time.monotonic() + within_seconds
    if last is not None and last.url != url:
        last = PipelineList(url, keys=last.keys)
    elif last is not None and layout is not None:
        kept = tuple(pipeline for pipeline in last.pipelines if pipeline.paths.layout is layout)
        last = replace(last, pipelines=kept)
    by_root = {} if last is None else last.by_root
    listing = RootListing(url=url, listed_at_micros=now_micros)
    listed = _listing_of(store, until)
    if isinstance(listed, str):
        return merged(last, replace(listing, problem=listed), {}, gone)
    roots = [str(job.root) for job in listed.jobs if layout in (None, job.layout)]
    newest, notes = _read(store, listed, roots, by_root, (time.monotonic() + until) / 2)
    # No server knows a managed job, and the server's API is asked for each job that it lacks.
    managed = {root for root in by_root if by_root[root].managed and root in roots}
    managed |= {root for root, epoch in newest.items() if epoch.managed}
    answers, problems = _answers(directory, sorted({*roots, *by_root} - managed), until)
    facts = {
        root: Facts(
            name=answers[root].facts.name if root in answers else None,
            sql=answers[root].facts.sql if root in answers else None,
            newest=newest.get(root),
            deleted=None if root in roots else _why_deleted(by_root[root], answers, listed),
        )
        for root in {*roots, *by_root}
    }
    hidden = [f"{path} cannot be listed: {error}" for path, error in listed.unreadable.items()]
    listing = replace(listing, roots=tuple(roots), notes=(*hidden, *problems, *notes))
    return merged(last, listing, facts, gone)


def _listing_of(store: ObjectStore, until: float) -> JobListing | str:
    """List the jobs; a text = why the listing is not to be trusted.

    A directory that may not be listed today nor tomorrow hides its jobs, and no others.
    """
    from arroyo_dagster.state.operations.catalog.jobs import list_readable_jobs

    try:
        listing = _in_time(lambda: list_readable_jobs(store), until)
    except ArroyoStateError as error:
        return f"the listing failed: {error}"
    if listing is None:
        return "the listing was not done in time"
    failed = [error for error in listing.unreadable.values() if error.retryable]
    if failed:
        return f"{len(failed)} directories could not be listed, the first: {failed[0]}"
    return listing


def _in_time(call: Callable[[], _T], until: float) -> _T | None:
    """Return the result of a call; None if it is not done in time. Errors as `call`.

    A call that is not done in time goes on in its thread, and its result is lost.
    """
    results: list[_T] = []
    errors: list[Exception] = []

    def run() -> None:
        try:
            results.append(call())
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="arroyo-listing", daemon=True)
    thread.start()
    thread.join(max(0.0, until - time.monotonic()))
    if errors:
        raise errors[0]
    return results[0] if results else None


def _paths(root: str) -> JobPaths:
    from arroyo_dagster.state.operations.catalog.jobs import paths_of

    return paths_of(root)


# ---- what Arroyo says ----------------------------------------------------------------------------


def _answers(
    directory: JobDirectory | None, roots: Sequence[str], until: float
) -> tuple[dict[str, JobAnswer], list[str]]:
    if directory is None or not directory.sources or not roots:
        return {}, []
    answers = _in_time(lambda: directory.look_up([_paths(root) for root in roots]), until)
    if answers is None:
        return {}, ["names of pipelines are not known: Arroyo did not answer in time"]
    problems = {str(error) for answer in answers for error in answer.problems}
    notes = [f"names of pipelines are not known: {problem}" for problem in sorted(problems)]
    return dict(zip(roots, answers, strict=True)), notes[:_MOST_NOTES]


def _why_deleted(
    pipeline: ListedPipeline, answers: Mapping[str, JobAnswer], shown: JobListing
) -> str | None:
    """Return the proof that Arroyo has deleted a pipeline whose state is not on the store.

    It is the proof that the gc of dead jobs demands: a source that knows another job of this URL
    says that there is no such pipeline; in the legacy layout only a database can. That source may
    be of another cluster that shares the URL: so Arroyo must have named the pipeline before, too.
    """
    from arroyo_dagster.state.model.job_facts import JobCondition
    from arroyo_dagster.state.planning.abandoned import why_abandoned

    answer = answers.get(pipeline.root)
    if answer is None or shown.hides(pipeline.paths):
        return None
    named = pipeline.current_name is not None and pipeline.managed is False
    if not named and answer.facts.condition is not JobCondition.GONE:
        return None
    others = [other for root, other in answers.items() if root != pipeline.root]
    return why_abandoned(pipeline.paths, answer, others, managed=False)


# ---- what the state says -------------------------------------------------------------------------


def _read(
    store: ObjectStore,
    shown: JobListing,
    roots: Iterable[str],
    known: Mapping[str, ListedPipeline],
    until: float,
) -> tuple[dict[str, EpochEnds], list[str]]:
    """Read the newest epochs that the last list has not read, as far as time allows.

    Returns:
        By root, and what could not be read.
    """
    from arroyo_dagster.state.storage.concurrency import concurrently

    read: dict[str, EpochEnds | None] = {}
    failed: dict[str, ArroyoStateError] = {}

    def newest(root: str) -> None:
        if time.monotonic() < until:
            try:
                read[root] = _newest(store, root, shown, known.get(root))
            except ArroyoStateError as error:
                failed[root] = error

    # New pipelines first: of the others the sources and sinks are known.
    order = sorted(roots, key=lambda root: (root in known, root))
    _in_time(lambda: concurrently(newest, order), until)
    epochs, problems = read.copy(), failed.copy()
    notes = [f"{root} was not read: {problems[root]}" for root in sorted(problems)[:_MOST_NOTES]]
    if left := len(order) - len(epochs) - len(problems):
        notes.append(f"{left} pipelines were not read in time")
    return {root: epoch for root, epoch in epochs.items() if epoch is not None}, notes


def _newest(
    store: ObjectStore, root: str, shown: JobListing, known: ListedPipeline | None
) -> EpochEnds | None:
    """Read the newest epoch; None if there is none, or it is the one that is known."""
    from arroyo_dagster.state.metadata.tree import CheckpointTree
    from arroyo_dagster.state.model.layout import Layout, parse_checkpoint_dir

    reader = CheckpointTree(store, _paths(root))
    if reader.paths.layout is Layout.LEGACY:
        names = shown.levels[reader.paths.checkpoints()].directories
        numbers = sorted(filter(None, map(parse_checkpoint_dir, names)))
    else:
        numbers = reader.epochs()
    for epoch in numbers[: -_NEWEST - 1 : -1]:
        if known is not None and epoch == known.epoch:
            return None
        if (ends := _epoch_ends(reader, epoch)) is not None:
            return ends
    return None


def _epoch_ends(reader: CheckpointTree, epoch: Epoch) -> EpochEnds | None:
    """Read one epoch; None if it is none: a directory of the legacy layout without metadata."""
    from arroyo_dagster.state.codec import metadata  # loads protobuf
    from arroyo_dagster.state.model.layout import Layout

    operators: Iterable[OperatorCheckpoint | None]
    if reader.paths.layout is Layout.LEGACY:
        path = reader.paths.legacy_metadata(epoch)
        head = reader.objects.optional(path, metadata.decode_legacy_checkpoint)
        if head is None:
            return None
        progress, names = head.progress, head.operators
        every = tuple(map(str, names))
        if progress is None:  # of Arroyo's operators only sources and sinks are read
            names = tuple(name for name in names if ends_of_arroyo({name: ()}))
        operators = [reader.load_operator_metadata(name, epoch) for name in names]
    else:
        checkpoint = reader.load_checkpoint_metadata(epoch)
        progress, operators = checkpoint.progress, checkpoint.operators
        names = tuple(operator.operator for operator in checkpoint.operators)
        every = tuple(map(str, names))
    configs = {
        str(name): () if operator is None else tuple(operator.configs.values())
        for name, operator in zip(names, operators, strict=True)
    }
    if progress is None:
        return EpochEnds(epoch, False, tuple(ends_of_arroyo(configs)), every)
    return EpochEnds(epoch, True, tuple(ends_of_managed(configs, progress.offsets)), every)
