"""Reading jobs from Arroyo's REST API, and requests to stop and start one.

`ArroyoApi` only reads. `ArroyoControl` sends requests that change jobs, for maintenance windows
only.

Source: crates/arroyo-api/src/{rest,pipelines,jobs}.rs, crates/arroyo-api/queries/api_queries.sql,
crates/arroyo-rpc/src/api_types/ (arroyo-state.md 10.3).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar
from urllib.parse import quote

from arroyo_dagster.errors import ArroyoStateError, FormatError, InputError, NotFoundError
from arroyo_dagster.state.model.ids import Epoch, JobId, PipelineId
from arroyo_dagster.state.model.job_facts import (
    Absence,
    CheckpointFacts,
    JobFacts,
    SourceAnswer,
    condition_of,
    newest_ready,
)
from arroyo_dagster.state.model.json_fields import MAX_I64, Fields
from arroyo_dagster.state.model.layout import JobPaths
from arroyo_dagster.state.model.surgery.graphs import StoredGraph
from arroyo_dagster.state.storage.arroyo.http_json import JsonServer
from arroyo_dagster.state.storage.concurrency import concurrently

_API = "/api/v1"
_PAGE = 500
_MAX_PAGES = 200
_NO_PIPELINE = "Pipeline not found"
_T = TypeVar("_T")
_NOT_ARROYO = "check that this is the address of Arroyo's API; if it is, report its version"


class ArroyoApi:
    """A client of one Arroyo server, without a cache.

    Args:
        url: `http://HOST:5115`, with or without `/api` or `/api/v1` at its end.
        token, limits: as in `JsonServer`.

    Raises:
        InputError: the address or the token is invalid.
    """

    def __init__(self, url: str, *, token: str | None = None, **limits: Any) -> None:
        base = re.sub(r"(/api(/v1)?)?/*$", "", url)
        self._server = JsonServer(f"{base}{_API}", token=token, **limits)
        self.source = self._server.url.removesuffix(_API)

    @property
    def from_anywhere(self) -> bool:
        """Whether other machines reach the same server at this address."""
        return self._server.from_anywhere

    # ---- one job or all --------------------------------------------------------------------------

    def look_up(self, jobs: Sequence[JobPaths], *, checkpoints: bool = False) -> list[SourceAnswer]:
        """Return the server's answer about each of `jobs`, in their order.

        The server's lists omit previews, so an unlisted job is looked up through its pipeline. In
        the legacy layout, which names no pipeline, it stays `Absence.NOT_LISTED`.

        Args:
            checkpoints: also request the epochs, with one request per job.

        Raises:
            InputError, NotFoundError, StorageError, FormatError: the jobs cannot be listed. An
                error that concerns one job only is the `problem` of its answer.
        """
        listed = self.jobs()
        return concurrently(lambda paths: self._answer(listed, paths, checkpoints), jobs)

    def _answer(
        self, listed: Mapping[JobId, JobFacts], paths: JobPaths, checkpoints: bool
    ) -> SourceAnswer:
        facts: JobFacts | None = listed.get(paths.job)
        try:
            if facts is None or not facts.concerns(paths):
                facts = None
                unlisted = self._unlisted(paths)
                if isinstance(unlisted, Absence):
                    return SourceAnswer(source=self.source, absence=unlisted)
                facts = unlisted
            facts = self._named(facts)
            facts = self._with_epochs(facts) if checkpoints else facts
        except ArroyoStateError as error:
            # Keep the facts read so far: a failed request for the name must not hide a running job.
            return SourceAnswer(source=self.source, facts=facts, problem=error)
        return SourceAnswer(source=self.source, facts=facts)

    def _unlisted(self, paths: JobPaths) -> JobFacts | Absence:
        if paths.pipeline is None:
            return Absence.NOT_LISTED
        try:
            facts = self._jobs_of(paths.pipeline).get(paths.job)
        except NotFoundError as error:
            if error.facts.get("answer") != _NO_PIPELINE:
                raise  # a gateway's 404 is no answer about a pipeline
            return Absence.NO_PIPELINE
        return Absence.NO_JOB if facts is None else facts

    def _named(self, facts: JobFacts) -> JobFacts:
        # A page that ends between pipelines of the same second loses the rest of that second, and
        # lists omit pipelines that the server cannot decode: request this one.
        if facts.name is not None or facts.pipeline is None:
            return facts
        return _with_pipeline(facts, self.pipeline(facts.pipeline))

    def _with_epochs(self, facts: JobFacts) -> JobFacts:
        if facts.pipeline is None:
            return facts
        epochs = self.checkpoints(facts.pipeline, facts.job)
        return replace(facts, checkpoints=epochs, newest_ready_epoch=newest_ready(epochs))

    # ---- requests --------------------------------------------------------------------------------

    def jobs(self) -> dict[JobId, JobFacts]:
        """Return every job that the server lists, with its pipeline's fields. Errors: `look_up`.

        Source: crates/arroyo-api/src/pipelines.rs, `get_pipelines`; jobs.rs, `get_jobs`.
        """
        # Jobs first: every pipeline they name existed before the pipelines are listed.
        listed = {facts.job: facts for facts in self._listed_jobs()}
        pipelines = self._pipelines()
        if any(facts.pipeline is None for facts in listed.values()):
            # Servers before 0.16 do not report the pipeline of a job.
            for jobs in concurrently(self._jobs_or_none, pipelines):
                listed.update({job: facts for job, facts in jobs.items() if job in listed})
        return {
            job: _with_pipeline(facts, pipelines.get(facts.pipeline or PipelineId("")))
            for job, facts in listed.items()
        }

    def pipeline(self, pipeline: PipelineId) -> Mapping[str, Any]:
        """Return the server's facts about a pipeline, by the names of `JobFacts`.

        Raises:
            NotFoundError: there is no such pipeline. Other errors as in `look_up`.
        """
        return self._asked(_path(pipeline), lambda answer: _pipeline(_fields(answer)))

    def pipeline_graph(self, pipeline: PipelineId) -> StoredGraph | None:
        """Return the server's answer about a pipeline, with its graph; None = it has none.

        Raises:
            NotFoundError: there is no such pipeline. Other errors as in `look_up`.
        """
        answer = self._asked(_path(pipeline), lambda found: found)
        return answer if isinstance(answer, Mapping) and "graph" in answer else None

    def checkpoints(self, pipeline: PipelineId, job: JobId) -> tuple[CheckpointFacts, ...]:
        """Return the epochs that the server lists for a job, oldest first.

        Empty for a job that stopped in leader mode, whose epochs are only in its state.

        Raises:
            NotFoundError: there is no such pipeline or job. Other errors as in `look_up`.
        """
        path = f"{_path(pipeline)}/jobs/{quote(job, safe='')}/checkpoints"
        epochs = self._asked(path, lambda answer: [_checkpoint(item) for item in _items(answer)])
        return tuple(sorted(epochs, key=lambda epoch: epoch.epoch))

    def _asked(
        self, path: str, decode: Callable[[Any], _T], query: Mapping[str, str | int] | None = None
    ) -> _T:
        answer = self._server.get(path, query)
        try:
            return decode(answer)
        except FormatError as error:
            error.facts["url"] = f"{self._server.url}{path}"
            raise

    def _decoded_jobs(self, answer: Any) -> list[JobFacts]:
        return [_job(item, self.source) for item in _items(answer)]

    def _listed_jobs(self) -> list[JobFacts]:
        try:
            return self._asked("/jobs", self._decoded_jobs)
        except NotFoundError as error:
            raise InputError(
                "this server has no list of jobs, so it is not Arroyo's API",
                url=self.source,
                next_step="give the address of Arroyo's API, http://HOST:5115 by default",
            ) from error

    def _jobs_of(self, pipeline: PipelineId) -> dict[JobId, JobFacts]:
        jobs = self._asked(f"{_path(pipeline)}/jobs", self._decoded_jobs)
        return {facts.job: replace(facts, pipeline=pipeline) for facts in jobs}

    def _jobs_or_none(self, pipeline: PipelineId) -> dict[JobId, JobFacts]:
        try:
            return self._jobs_of(pipeline)
        except NotFoundError:
            return {}  # deleted since it was listed

    def _pipelines(self) -> dict[PipelineId, Mapping[str, Any]]:
        """Return every listed pipeline, page by page; refuse a page without new pipelines."""
        pipelines: dict[PipelineId, Mapping[str, Any]] = {}
        query: dict[str, str | int] = {"limit": _PAGE}
        for _ in range(_MAX_PAGES):
            page, more = self._asked("/pipelines", _page, query)
            fresh = [pipeline for pipeline in page if pipeline not in pipelines]
            pipelines |= page
            if not more:
                return pipelines
            if not fresh:
                raise FormatError(
                    "the list of pipelines does not end: a page repeats an earlier one",
                    url=self.source,
                    next_step=_NOT_ARROYO,
                )
            query["starting_after"] = fresh[-1]
        raise FormatError(
            f"the list of pipelines has more than {_MAX_PAGES} pages",
            url=self.source,
            next_step=_NOT_ARROYO,
        )


class ArroyoControl(ArroyoApi):
    """A client that can also stop and start pipelines; each call is one request.

    If a request fails with a StorageError, it is unknown whether it was executed; every request may
    be repeated.

    Source: crates/arroyo-api/src/pipelines.rs, `patch_pipeline`, `restart_pipeline`.
    """

    def stop_with_checkpoint(self, pipeline: PipelineId) -> None:
        """Request a last checkpoint and a stop."""
        self._server.send("PATCH", _path(pipeline), {"stop": "checkpoint"})

    def start(self, pipeline: PipelineId, parallelism: int | None = None) -> None:
        """Request a stopped job to run from its newest checkpoint; also cancels a stop request.

        Args:
            parallelism: of all its operators from now on; None = as it was.
        """
        change: dict[str, Any] = {"stop": "none"}
        if parallelism is not None:
            change["parallelism"] = parallelism
        self._server.send("PATCH", _path(pipeline), change)

    def restart(self, pipeline: PipelineId) -> None:
        """Request a failed job to run again from its newest checkpoint."""
        self._server.send("POST", f"{_path(pipeline)}/restart", {"force": False})


# ---- documents to facts --------------------------------------------------------------------------


def _path(pipeline: PipelineId) -> str:
    return f"/pipelines/{quote(pipeline, safe='')}"


def _page(answer: Any) -> tuple[dict[PipelineId, Mapping[str, Any]], bool]:
    page = {PipelineId(item.text("id", empty=False)): _pipeline(item) for item in _items(answer)}
    return page, bool(_fields(answer).optional_flag("hasMore"))


def _pipeline(one: Fields) -> Mapping[str, Any]:
    """Return the fields of a pipeline without its graph, which is long and not needed."""
    return {
        "name": one.text("name", empty=False),
        "sql": one.optional_text("query"),
        "action": one.optional_text("action", empty=False),
        "action_in_progress": one.optional_flag("action_in_progress"),
        "stop_requested": one.optional_text("stop", empty=False),
    }


def _with_pipeline(facts: JobFacts, pipeline: Mapping[str, Any] | None) -> JobFacts:
    return replace(facts, **pipeline) if pipeline else facts


def _job(one: Fields, source: str) -> JobFacts:
    state = one.text("state", empty=False)
    pipeline = one.optional_text("pipeline_id", empty=False)
    # Until 0.15 the reason of a failure had another field name.
    failure = one.value("failure_reason" if "failure_reason" in one else "failure_message")
    return JobFacts(
        job=JobId(one.text("id", empty=False)),
        source=source,
        pipeline=None if pipeline is None else PipelineId(pipeline),
        condition=condition_of(state),
        state=state,
        run_id=one.optional_number("run_id", largest=MAX_I64),
        running_desired=one.optional_flag("running_desired"),
        failure=failure if isinstance(failure, str | None) else json.dumps(failure),
        start_time_micros=one.optional_number("start_time", largest=MAX_I64),
        finish_time_micros=one.optional_number("finish_time", largest=MAX_I64),
    )


def _checkpoint(one: Fields) -> CheckpointFacts:
    kind = one.optional_text("checkpoint_type", empty=False)
    finished = one.optional_number("finish_time", largest=MAX_I64)
    return CheckpointFacts(
        epoch=Epoch(one.number("epoch", largest=MAX_I64)),
        ready=finished is not None,  # while it commits it has no finish_time either
        final=None if kind is None else kind == "stopping",
        start_time_micros=one.optional_number("start_time", largest=MAX_I64),
        finish_time_micros=finished,
    )


def _items(answer: Any) -> tuple[Fields, ...]:
    return _fields(answer).objects("data")


def _fields(answer: Any) -> Fields:
    return Fields(answer, next_step=_NOT_ARROYO)
