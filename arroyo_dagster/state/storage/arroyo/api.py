"""Reading jobs from Arroyo's REST API, and requests to stop and start one.

`ArroyoApi` only reads. `ArroyoControl` sends requests that change jobs, for maintenance windows
only.

Source: crates/arroyo-api/src/{rest,pipelines,jobs}.rs, crates/arroyo-api/queries/api_queries.sql,
crates/arroyo-rpc/src/api_types/ (arroyo-state.md 10.3).
"""

from __future__ import annotations

import functools
import http.client
import ipaddress
import json
import re
import ssl
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from email.message import Message
from typing import IO, Any, Literal, NoReturn, TypeVar
from urllib.parse import quote

from arroyo_dagster.errors import (
    ArroyoStateError,
    FormatError,
    InputError,
    NotFoundError,
    StorageError,
)
from arroyo_dagster.redaction import (
    redact_text,
    redact_url,
    register_secrets,
    register_url,
    replaced,
)
from arroyo_dagster.state.model.ids import Epoch, JobId, PipelineId
from arroyo_dagster.state.model.job_facts import (
    Absence,
    CheckpointFacts,
    JobFacts,
    SourceAnswer,
    condition_of,
    newest_ready,
)
from arroyo_dagster.state.model.json_fields import MAX_I64, Fields, parse_json
from arroyo_dagster.state.model.layout import JobPaths
from arroyo_dagster.state.model.surgery.graphs import StoredGraph
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


# ---- JSON documents from and to an HTTP server, with limits on waits, answers and addresses ------

_CHUNK = 1 << 16
_REMARK_BYTES = 4096
_RETRYABLE_CODES = (408, 425, 429)


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Refuses redirects: they lead to a login page or another host, which must not get a token."""

    def redirect_request(
        self,
        req: urllib.request.Request,
        fp: IO[bytes],
        code: int,
        msg: str,
        headers: Message,
        newurl: str,
    ) -> NoReturn:
        fp.close()
        raise InputError(
            "the server redirects to another address, which was not queried",
            url=redact_url(req.full_url),
            status=code,
            location=redact_url(newurl),
            next_step="give the address at which the API itself answers, or a token that it "
            "accepts",
        )


class JsonServer:
    """Requests below one address, without state between them.

    Args:
        url: the address, `http` or `https`, without user, query or fragment.
        token: sent as a bearer token; never displayed.
        timeout_seconds: the maximum time without data from the server.
        deadline_seconds: the maximum time of one answer.
        max_bytes: the maximum size of one answer.

    Raises:
        InputError: the address or the token is invalid.
    """

    def __init__(
        self,
        url: str,
        *,
        token: str | None = None,
        timeout_seconds: float = 10.0,
        deadline_seconds: float = 60.0,
        max_bytes: int = 64 << 20,
    ) -> None:
        register_url(url)
        register_secrets(token)
        self.url = _checked_url(url)
        self._token = token
        self._headers = {"Accept": "application/json", "User-Agent": "arroyo-state"}
        if token is not None:
            if not re.fullmatch(r"[\x21-\x7e]+", token):
                raise InputError(
                    "the token is empty, or contains a character that a header cannot carry",
                    next_step="check its source, for example for a line break at its end",
                )
            self._headers["Authorization"] = f"Bearer {token}"
        self._timeout = timeout_seconds
        self._deadline = deadline_seconds
        self._max_bytes = max_bytes
        # `build_opener` would also open file: and ftp: addresses.
        self._opener = urllib.request.OpenerDirector()
        for handler in (
            urllib.request.ProxyHandler(),
            urllib.request.HTTPHandler(),
            urllib.request.HTTPSHandler(),
            urllib.request.HTTPDefaultErrorHandler(),
            urllib.request.HTTPErrorProcessor(),
            _NoRedirects(),
        ):
            self._opener.add_handler(handler)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the arguments: the token goes along, connections do not."""
        rebuild = functools.partial(
            JsonServer,
            token=self._token,
            timeout_seconds=self._timeout,
            deadline_seconds=self._deadline,
            max_bytes=self._max_bytes,
        )
        return rebuild, (self.url,)

    @property
    def from_anywhere(self) -> bool:
        """Whether other machines reach the same server at this address: not one of this machine."""
        host = urllib.parse.urlsplit(self.url).hostname or ""
        try:
            return not ipaddress.ip_address(host).is_loopback
        except ValueError:
            return host != "localhost" and not host.endswith(".localhost")

    def get(self, path: str, query: Mapping[str, str | int] | None = None) -> Any:
        """Return the document at `path`, which is percent-encoded and begins with `/`.

        Raises:
            InputError: 401, 403, or a redirect.
            NotFoundError: 404.
            StorageError: no answer, an incomplete answer, or the server failed; retryable unless
                the failure is permanent.
            FormatError: the answer is too long.
        """
        url = f"{self.url}{path}"
        full = f"{url}?{urllib.parse.urlencode(query)}" if query else url
        return self._answer(urllib.request.Request(full, headers=self._headers), url)

    def send(self, method: Literal["PATCH", "POST"], path: str, body: Mapping[str, Any]) -> Any:
        """Send a change once, and return the answer. Errors as in `get`; after a StorageError it is
        unknown whether the change was made."""
        url = f"{self.url}{path}"
        headers = {**self._headers, "Content-Type": "application/json"}
        data = json.dumps(body).encode()
        return self._answer(urllib.request.Request(url, data, headers, method=method), url)

    def _answer(self, request: urllib.request.Request, url: str) -> Any:
        def replacement(error: Exception) -> ArroyoStateError:
            if isinstance(error, urllib.error.HTTPError):
                with error:
                    return _refused(error, url)
            return _unreachable(error, url, self._timeout)

        with replaced((OSError, http.client.HTTPException), replacement):
            return _document(self._read(request, url), url)

    def _read(self, request: urllib.request.Request, url: str) -> bytes:
        until = time.monotonic() + self._deadline
        body = bytearray()
        with self._opener.open(request, timeout=self._timeout) as answer:
            # The timeout limits one wait; a server that sends slowly needs a deadline as well.
            while chunk := answer.read1(_CHUNK):
                body += chunk
                if len(body) > self._max_bytes:
                    raise FormatError(
                        f"the answer is longer than {self._max_bytes} bytes",
                        url=url,
                        next_step="check that this is Arroyo's API",
                    )
                if time.monotonic() > until:
                    raise StorageError(
                        f"the server's answer takes longer than {self._deadline:g} s",
                        url=url,
                        next_step="try again later, when the server has less load",
                    )
        return bytes(body)


def _checked_url(url: str) -> str:
    """Return the address without a trailing `/`; raise InputError if it is invalid."""
    problem = None
    try:
        parts = urllib.parse.urlsplit(url)
        _ = parts.port  # raises for an invalid port
        if parts.scheme not in ("http", "https") or not parts.hostname:
            problem = "it is not http://HOST:PORT or https://HOST"
        elif "@" in parts.netloc:
            problem = "it holds a user or password"
        elif parts.query or parts.fragment or re.search(r"[\s\x00-\x1f\x7f]", url):
            problem = "it holds a query, a fragment or a space"
        else:
            parts.hostname.encode("idna")
    except ValueError:
        problem = "its host or its port is not valid"  # Python's own message repeats a part of it
    if problem is not None:
        raise InputError(
            f"not the address of a server: {problem}",
            url=redact_url(url),
            next_step="give it in the form http://HOST:5115; pass a token separately",
        )
    return f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/')}"


def _document(body: bytes, url: str) -> Any:
    try:
        return parse_json(body)
    except (ValueError, RecursionError) as error:
        raise StorageError(
            "the server's answer is not JSON, or is incomplete",
            url=url,
            size_bytes=len(body),
            next_step="try again; if it persists, check that this is Arroyo's API and not a "
            "proxy page",
        ) from error


def _refused(error: urllib.error.HTTPError, url: str) -> ArroyoStateError:
    """Return the error for a status other than 200."""
    facts: dict[str, Any] = {"url": url, "status": error.code, "answer": _remark(error)}
    if error.code in (401, 403):
        step = "give a token with read permission, or check the given one"
        return InputError("the server refuses this token or caller", next_step=step, **facts)
    if error.code == 404:
        return NotFoundError("the server has nothing at this address", **facts)
    if error.code >= 500 or error.code in _RETRYABLE_CODES:
        return StorageError("the server failed", next_step="try again later", **facts)
    step = "check that this is Arroyo's API, and of which version"
    return StorageError("the server refused the request", retryable=False, next_step=step, **facts)


def _remark(error: urllib.error.HTTPError) -> str | None:
    """Return the message in the body of an error, if it has Arroyo's form."""
    try:
        answer = parse_json(error.read(_REMARK_BYTES))
    except (OSError, ValueError, RecursionError, http.client.HTTPException):
        return None
    text = answer.get("error") if isinstance(answer, dict) else None
    return redact_text(text)[:200] if isinstance(text, str) else None


def _unreachable(error: Exception, url: str, timeout_seconds: float) -> StorageError:
    reason = error.reason if isinstance(error, urllib.error.URLError) else error
    if isinstance(reason, ssl.SSLCertVerificationError):
        text, retryable = f"its certificate is not trusted: {reason.verify_message}", False
    elif isinstance(reason, TimeoutError):
        text, retryable = f"it did not answer within {timeout_seconds:g} s", True
    else:
        text, retryable = redact_text(str(reason)) or type(reason).__name__, True
    return StorageError(
        f"the server did not answer: {text}",
        retryable=retryable,
        url=url,
        next_step="check the address, and that the server runs and can be reached from here",
    )
