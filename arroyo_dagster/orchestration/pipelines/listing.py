"""The list of pipelines, from what a store, Arroyo and the last list say.

A pipeline keeps its key for ever, and leaves the list only on proof: see `merged`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypeVar

from arroyo_dagster.errors import ArroyoStateError
from arroyo_dagster.orchestration.pipelines.lineage import (
    End,
    endpoints_of,
    ends_of_arroyo,
    ends_of_endpoints,
    ends_of_managed,
)
from arroyo_dagster.orchestration.pipelines.model import Pipeline, PipelineList
from arroyo_dagster.orchestration.pipelines.names import Key, key_part, numbered_part
from arroyo_dagster.orchestration.pipelines.sql import without_secrets

if TYPE_CHECKING:
    from arroyo_dagster.state.metadata.reader import BackendReader
    from arroyo_dagster.state.model.ids import Epoch
    from arroyo_dagster.state.model.job_facts import JobAnswer
    from arroyo_dagster.state.model.layout import JobPaths, Layout
    from arroyo_dagster.state.operations.catalog.job_directory import JobDirectory
    from arroyo_dagster.state.operations.catalog.jobs import JobListing
    from arroyo_dagster.state.storage.store import ObjectStore

_T = TypeVar("_T")
_NEWEST = 4
"""How many of the newest epochs are tried: the newest may not be finished yet."""
_SHARE_OF_SOURCES = 0.5
"""Of the time that is left after the listing: the time that Arroyo has to answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """What the listing of a store shows.

    Attributes:
        roots: of the pipelines in it.
        problem: why it is not to be trusted; None = it is.
        notes: what it leaves out on purpose.
    """

    url: str
    listed_at_micros: int
    roots: tuple[str, ...] = ()
    problem: str | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What is known of one pipeline besides its root; None = not known this time.

    Attributes:
        name, sql: as Arroyo says.
        managed, epoch, ends: as the newest epoch says that could be read.
        deleted: the proof that Arroyo has deleted it.
    """

    name: str | None = None
    sql: str | None = field(default=None, repr=False)
    managed: bool | None = None
    epoch: int | None = None
    ends: tuple[End, ...] | None = None
    deleted: str | None = None


NO_FACTS = Facts()


# ---- the rule ------------------------------------------------------------------------------------


def merged(
    last: PipelineList | None,
    listing: Listing,
    facts: Mapping[str, Facts],
    gone: Collection[str] = (),
) -> PipelineList:
    """Return the list after a listing.

    * A listing with a problem changes nothing, nor does one without a pipeline where the last list
      has some that did not leave.
    * A pipeline leaves if it is not in the listing and its deletion is proven, or its root, its
      name or its key is in `gone`; or if it is in the listing and its root is in `gone`.
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
        and gone_names(pipeline).isdisjoint(gone)
    ]
    problem = listing.problem
    if problem is None and not listing.roots and kept:
        problem = f"the listing shows no pipeline, and the last one showed {len(before.pipelines)}"
    if problem is not None:
        return replace(before, problem=problem)
    known = before.by_root
    names = {root: _utf8(facts.get(root, NO_FACTS).name) for root in listed}
    keys = with_keys(before.keys, names)
    pipelines = [*kept]
    for root in listed:
        pipeline = known.get(root) or _with_name(Pipeline(root, keys[root]), names[root])
        pipelines.append(_with_facts(pipeline, facts.get(root, NO_FACTS)))
    return PipelineList(
        url=listing.url,
        pipelines=tuple(sorted(pipelines, key=lambda pipeline: pipeline.key)),
        keys=keys,
        listed_at_micros=listing.listed_at_micros,
        missing=tuple(sorted(pipeline.root for pipeline in kept)),
        notes=listing.notes,
    )


def gone_names(pipeline: Pipeline) -> set[str]:
    """Return the texts by which a user may call a pipeline that is gone."""
    names = {pipeline.root, "/".join(pipeline.key), pipeline.name, pipeline.current_name}
    return {name for name in names if name}


def with_keys(given: Mapping[str, Key], names: Mapping[str, str | None]) -> dict[str, Key]:
    """Return the given keys, and one for each further root; no two are equal.

    Args:
        names: by root; None = the root makes the key.
    """
    keys = dict(given)
    taken = {*keys.values()}
    for root in sorted(names.keys() - keys.keys()):
        name = names[root]
        first = tuple(map(key_part, [name] if name else root.split("/")))
        seconds = (root.rpartition("/")[2], root)
        candidates = [first, *((*first[:-1], numbered_part(first[-1], one)) for one in seconds)]
        keys[root] = next(key for key in candidates if key not in taken)
        taken.add(keys[root])
    return keys


def _with_name(pipeline: Pipeline, name: str | None) -> Pipeline:
    """Return a new pipeline with the name that its key is made of; one that left may come back."""
    is_of_name = name is not None and pipeline.key[-1].partition("---")[0] == key_part(name)
    return replace(pipeline, name=name if is_of_name else None)


def _with_facts(pipeline: Pipeline, facts: Facts) -> Pipeline:
    sql = pipeline.sql if facts.sql is None else _utf8(without_secrets(facts.sql))
    ends: Sequence[End] | None = facts.ends
    if ends is None and pipeline.epoch is not None and not pipeline.managed:
        ends = ends_of_endpoints(pipeline)
    new = replace(
        pipeline,
        current_name=_utf8(facts.name) or pipeline.current_name,
        managed=pipeline.managed if facts.managed is None else facts.managed,
        epoch=pipeline.epoch if facts.epoch is None else facts.epoch,
        sql=sql,
    )
    if facts.ends is None and (sql == pipeline.sql or pipeline.managed):
        return new
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

    It costs the listings above the data files, the answers of Arroyo for all jobs together, and one
    or a few small objects of each pipeline with a new epoch. What is not read in time is read by
    the next listing; if the listing itself is not done in time, it changes nothing.

    Args:
        directory: the sources of names, SQL and deletions; None = there are none.
        last: the last list. Of another URL, only its keys count.
        url: for display; without secrets.
        layout: of the pipelines; None = both.
    """
    until = time.monotonic() + within_seconds
    last = _of_place(last, url, layout)
    listing, levels = _listed(store, url, layout, now_micros, until)
    known = {} if last is None else last.by_root
    if levels is None:
        return merged(last, listing, {}, gone)
    answers, notes = _answers(directory, {*listing.roots, *known}, until)
    hidden = {root for root in known if levels.hides(_paths(root))}
    facts = {root: _said(answer) for root, answer in answers.items()}
    for root in known.keys() - {*listing.roots} - hidden:
        facts[root] = _deleted(known[root], answers, facts.get(root, NO_FACTS))
    read, problems = _read(store, levels, listing.roots, known, until)
    for root, epoch in read.items():
        said = facts.get(root, NO_FACTS)
        facts[root] = replace(said, managed=epoch.managed, epoch=epoch.epoch, ends=epoch.ends)
    listing = replace(listing, notes=(*listing.notes, *notes, *problems))
    return merged(last, listing, facts, gone)


def _of_place(last: PipelineList | None, url: str, layout: Layout | None) -> PipelineList | None:
    if last is None or last.url != url:
        return None if last is None else PipelineList(url, keys=last.keys)
    if layout is None:
        return last
    kept = tuple(one for one in last.pipelines if one.paths.layout is layout)
    return last if len(kept) == len(last.pipelines) else replace(last, pipelines=kept)


def _paths(root: str) -> JobPaths:
    from arroyo_dagster.state.operations.catalog.jobs import paths_of

    return paths_of(root)


def _listed(
    store: ObjectStore, url: str, layout: Layout | None, now_micros: int, until: float
) -> tuple[Listing, JobListing | None]:
    from arroyo_dagster.state.operations.catalog.jobs import list_readable_jobs, unlisted

    empty = Listing(url=url, listed_at_micros=now_micros)
    try:
        found = _in_time(lambda: list_readable_jobs(store), until)
    except ArroyoStateError as error:
        return replace(empty, problem=f"the listing failed: {error}"), None
    if found is None:
        return replace(empty, problem="the listing took too long; raise list_within"), None
    failed = [error for error in found.unreadable.values() if error.retryable]
    if failed:
        text = f"{len(failed)} directories could not be listed: {failed[0]}"
        return replace(empty, problem=text), None
    notes = [f"{path} cannot be listed: {error}" for path, error in found.unreadable.items()]
    notes += [f"{path} is left out: no store can write its name" for path in unlisted(found.levels)]
    roots = (job.root for job in found.jobs if layout in (None, job.layout))
    return replace(empty, roots=tuple(roots), notes=tuple(notes)), found


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


# ---- what Arroyo says ----------------------------------------------------------------------------


def _answers(
    directory: JobDirectory | None, roots: Iterable[str], until: float
) -> tuple[dict[str, JobAnswer], list[str]]:
    if directory is None or not directory.sources:
        return {}, []
    asked = sorted(roots)
    share = time.monotonic() + (until - time.monotonic()) * _SHARE_OF_SOURCES
    found = _in_time(lambda: directory.look_up([_paths(root) for root in asked]), share)
    if found is None:
        return {}, ["the names of pipelines are not known: Arroyo did not answer in time"]
    problems = {error.message: error for answer in found for error in answer.problems}
    notes = [f"the names of some pipelines are not known: {error}" for error in problems.values()]
    return dict(zip(asked, found, strict=True)), notes[:3]


def _said(answer: JobAnswer) -> Facts:
    return Facts(name=answer.facts.name, sql=answer.facts.sql)


def _deleted(pipeline: Pipeline, answers: Mapping[str, JobAnswer], said: Facts) -> Facts:
    """Add the proof that Arroyo has deleted a pipeline whose state is not on the store.

    It is the proof that the gc of dead jobs demands: a source that knows another job of this URL
    says that there is no such pipeline. That source may be of another cluster that shares the URL;
    so, besides, the list must know from Arroyo that the pipeline existed. In the legacy layout only
    a database can prove it.
    """
    from arroyo_dagster.state.model.job_facts import JobCondition
    from arroyo_dagster.state.planning.abandoned import why_abandoned

    answer = answers.get(pipeline.root)
    if answer is None:
        return said
    was_named = pipeline.current_name is not None and pipeline.managed is False
    if answer.facts.condition is not JobCondition.GONE and not was_named:
        return said
    others = [other for root, other in answers.items() if root != pipeline.root]
    return replace(said, deleted=why_abandoned(pipeline.paths, answer, others, managed=False))


# ---- what the state says -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Epoch:
    epoch: int
    managed: bool
    ends: tuple[End, ...]


def _read(
    store: ObjectStore,
    levels: JobListing,
    roots: Sequence[str],
    known: Mapping[str, Pipeline],
    until: float,
) -> tuple[dict[str, _Epoch], list[str]]:
    """Read the newest epochs of the pipelines in the order of their roots, as far as time allows.

    Returns:
        Those that are new, by root, and what could not be read.
    """
    from arroyo_dagster.state.storage.concurrency import concurrently

    done: dict[str, _Epoch] = {}
    failed: dict[str, ArroyoStateError] = {}
    finished: set[str] = set()

    def read(root: str) -> None:
        if time.monotonic() >= until:
            return
        pipeline = known.get(root)
        seen = None if pipeline is None else pipeline.epoch
        try:
            epoch = _newest(store, _paths(root), levels, seen)
        except ArroyoStateError as error:
            failed[root] = error
        else:
            if epoch is not None:
                done[root] = epoch
        finished.add(root)

    # New pipelines first: of the others the sources and sinks are known.
    order = sorted(roots, key=lambda root: (root in known, root))
    _in_time(lambda: concurrently(read, order), until)
    notes = [
        f"the sources and sinks of {root} are not known anew: {error}"
        for root, error in sorted(failed.copy().items())
    ]
    if left := len(order) - len(finished):
        notes.append(f"the sources and sinks of {left} pipelines were not read in time")
    return done.copy(), notes


def _newest(
    store: ObjectStore, paths: JobPaths, levels: JobListing, seen: int | None
) -> _Epoch | None:
    """Read the newest epoch that is there; None if it is the one seen, or there is none."""
    from arroyo_dagster.state.metadata.reader import BackendReader
    from arroyo_dagster.state.model.layout import Layout

    reader = BackendReader(store, paths)
    legacy = paths.layout is Layout.LEGACY
    for epoch in _newest_first(reader, levels) if legacy else reader.epochs()[:-2:-1]:
        if epoch == seen:
            return None
        found = _legacy(reader, epoch) if legacy else _protocol(reader, epoch)
        if found is not None:
            return found
    return None


def _newest_first(reader: BackendReader, levels: JobListing) -> Iterator[Epoch]:
    """Yield the newest numbers of checkpoint directories, which the listing has shown."""
    from arroyo_dagster.state.model.layout import parse_checkpoint_dir

    names = levels.levels[str(reader.paths.checkpoints())].directories
    found = (parse_checkpoint_dir(name) for name in names)
    yield from sorted((epoch for epoch in found if epoch is not None), reverse=True)[:_NEWEST]


def _legacy(reader: BackendReader, epoch: Epoch) -> _Epoch | None:
    from arroyo_dagster.state.codec import metadata  # loads protobuf

    head = reader.objects.optional(
        reader.paths.legacy_metadata(epoch), metadata.decode_legacy_checkpoint
    )
    if head is None:
        return None
    operators = {
        # Only the operators that may be a source or a sink are read.
        str(name): reader.load_operator_metadata(name, epoch)
        for name in head.operators
        if head.progress is not None or ends_of_arroyo({name: ()})
    }
    configs = {
        name: () if operator is None else tuple(operator.configs.values())
        for name, operator in operators.items()
    }
    if head.progress is not None:
        return _Epoch(epoch, True, tuple(ends_of_managed(configs, head.progress.offsets)))
    return _Epoch(epoch, False, tuple(ends_of_arroyo(configs)))


def _protocol(reader: BackendReader, epoch: Epoch) -> _Epoch:
    checkpoint = reader.load_checkpoint_metadata(epoch)
    configs = {str(one.operator): tuple(one.configs.values()) for one in checkpoint.operators}
    if checkpoint.progress is not None:
        return _Epoch(epoch, True, tuple(ends_of_managed(configs, checkpoint.progress.offsets)))
    return _Epoch(epoch, False, tuple(ends_of_arroyo(configs)))
