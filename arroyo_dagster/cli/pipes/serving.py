"""`serve`: do what a run of Dagster asks for through Pipes, and send the answer back.

Exit code 0 says that the answer was sent, also if it is an error: the run then fails with it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import redirect_stderr, redirect_stdout
from typing import TYPE_CHECKING, Any

import click

from arroyo_dagster import __version__
from arroyo_dagster.cli.common import EXIT_INTERRUPTED, error_json
from arroyo_dagster.errors import ArroyoStateError, ConflictError, InputError
from arroyo_dagster.optional_packages import explained_imports
from arroyo_dagster.redaction import redact_text, redacted_cause
from arroyo_dagster.spark.settings import SparkSettings
from arroyo_dagster.state.codec.derived import plain_values, value_from_json
from arroyo_dagster.state.codec.gc import gc_plan_to_json
from arroyo_dagster.state.codec.messages import REQUEST, error_from_json, split_document
from arroyo_dagster.state.model.compaction import CompactionSettings, MergeOutcome
from arroyo_dagster.state.model.garbage import GcPlan, PlanKind, Retention
from arroyo_dagster.state.model.layout import JobPaths
from arroyo_dagster.state.model.progress import progress_logger
from arroyo_dagster.state.operations.catalog.job_directory import open_directory
from arroyo_dagster.state.operations.compaction.job import CompactionOptions
from arroyo_dagster.state.operations.gc.execute import GcOptions
from arroyo_dagster.state.operations.gc.plan import GcRequest, plan_gc
from arroyo_dagster.state.storage.store import ObjectStore

if TYPE_CHECKING:
    from dagster_pipes import (
        PipesContext,
        PipesContextLoader,
        PipesMessageWriter,
        PipesParamsLoader,
    )

_POLL_SECONDS = 1.0


def serve(
    *,
    spark: SparkSettings | None = None,
    context_loader: PipesContextLoader | None = None,
    message_writer: PipesMessageWriter[Any] | None = None,
    params_loader: PipesParamsLoader | None = None,
) -> None:
    """Do what the run of Dagster asks for that started this process; then end it.

    SIGINT and SIGTERM interrupt the work, and so does the end of the `spark-submit` that started
    this process: leases are released, and nothing is half published.

    Args:
        spark: which Spark, if `spark-submit` did not start this process, and from which amount of
            work a step runs on it; in this process below that.
        context_loader, message_writer, params_loader: the counterparts of those that the Pipes
            client uses; the defaults of `dagster_pipes`, with parameters from variables or from the
            command line.

    Raises:
        InputError: dagster-pipes is not installed, or no Pipes client started this process.
        SystemExit: with code 130, if it was interrupted.
    """
    with explained_imports():
        import dagster_pipes
    params_loader = params_loader or _find_parameters()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    _follow_parent()
    try:
        with dagster_pipes.open_dagster_pipes(
            context_loader=context_loader,
            message_writer=message_writer,
            params_loader=params_loader,
        ) as pipes:
            request = dict(pipes.extras.get(REQUEST, {}))
            asked = Asked(request, spark or SparkSettings(), pipes.log.info)
            for message in split_document(_answer(pipes, asked)):
                pipes.report_custom_message(message)
        asked.close()
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)


def _find_parameters() -> PipesParamsLoader:
    import dagster_pipes

    kinds: list[Any] = [
        dagster_pipes.PipesEnvVarParamsLoader,
        dagster_pipes.PipesCliArgsParamsLoader,
    ]
    for loader in (kind() for kind in kinds):
        if loader.is_dagster_pipes_process():
            active: PipesParamsLoader = loader
            return active
    raise InputError(
        "no Pipes client started this process",
        next_step="let a run of Dagster start it: see PipesRunner in the documentation",
    )


def _follow_parent() -> None:
    """Interrupt this process once the JVM of the `spark-submit` that started it has ended.

    A Pipes client ends that JVM, which does not end this process.
    """
    if "PYSPARK_GATEWAY_PORT" not in os.environ:
        return
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_POLL_SECONDS)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=watch, name="arroyo-parent", daemon=True).start()


def _answer(pipes: PipesContext, asked: Asked) -> dict[str, Any]:
    try:
        asked.check()
        with contextlib.closing(LogLines(asked.log)) as lines, contextlib.redirect_stderr(lines):
            return do_work(asked)
    except ArroyoStateError as error:
        return {**asked.partial, "error": error_json(error)}
    except Exception as error:
        cause = redacted_cause(error)
        pipes.log.error(redact_text("".join(traceback.format_exception(cause))))
        unexpected = ArroyoStateError(
            f"{type(cause).__name__}: {cause}", next_step="read the traceback in the log of the run"
        )
        return {**asked.partial, "error": error_json(unexpected)}


# ---- what a run of Dagster may ask for: a compaction, gc, or a command of `arroyo-state` ---------

_ERROR_LINE = '{"error": '


@dataclasses.dataclass(slots=True)
class Asked:
    """What a run asks for.

    Attributes:
        request: JSON values, as `orchestration.pipes` writes them.
        spark: which Spark to use.
        log: writes a line to the log of the run.
        partial: what was done before an error, for the answer.
    """

    request: Mapping[str, Any]
    spark: SparkSettings
    log: Callable[[str], None]
    partial: dict[str, Any] = dataclasses.field(default_factory=dict)
    _opened: Any = None

    def check(self) -> None:
        """Refuse what this version cannot do.

        Raises:
            InputError: nothing was asked, or by another version.
        """
        if not self.request:
            raise InputError(
                "the run of Dagster asks this process for nothing",
                next_step="start it through PipesRunner or run_pipes_command",
            )
        version = str(self.request.get("version"))
        if version != __version__:
            raise InputError(
                f"arroyo_dagster has version {version} in Dagster and {__version__} in the process "
                "that the Pipes client started",
                next_step="install the same version in both",
            )

    def session(self) -> Any:
        """Return the session; the first call starts it and logs which Spark it is."""
        from arroyo_dagster.spark.session import open_session

        if self._opened is None:
            self._opened = open_session(self.spark)
            self.partial["spark"] = str(self._opened.choice)
            self.log(f"Spark: {self._opened.choice}")
        return self._opened.session

    def close(self) -> None:
        """Stop the session that was started for this."""
        if self._opened is not None and self._opened.started:
            self._opened.session.stop()

    def paths(self) -> JobPaths:
        """Return the job."""
        return value_from_json(JobPaths, self.request["job"])

    def store(self) -> ObjectStore:
        """Open the store of the checkpoint URL, with this process's variables.

        What is read-only on the host of Dagster is read-only here.
        """
        from arroyo_dagster.state.storage.read_only import ReadOnlyPrefix, guarded
        from arroyo_dagster.state.storage.remote.open import open_store
        from arroyo_dagster.state.storage.urls import parse_url

        spec = self.request["store"]
        options, deleting = spec["storage_options"], spec["delete_options"]
        store = open_store(
            spec["url"],
            options=_with_variables(options),
            delete_options=_with_variables(deleting) if deleting else None,
        )
        prefixes = (ReadOnlyPrefix(prefix=prefix, file=file) for prefix, file in spec["read_only"])
        return guarded(store, parse_url(spec["url"]), prefixes)


def do_work(asked: Asked) -> dict[str, Any]:
    """Do it, and return the answer as JSON values.

    Raises:
        ArroyoStateError: as the operation; `asked.partial` has what was done before.
    """
    kinds = {"compact": _compact, "gc": _run_gc, "command": _command}
    return {**kinds[asked.request["do"]](asked), **asked.partial}


def _with_variables(value: Any) -> Any:
    """Replace each `{env: NAME}` in options by the value of the variable."""
    if isinstance(value, list):
        return [_with_variables(item) for item in value]
    if not isinstance(value, Mapping):
        return value
    if value.keys() != {"env"}:
        return {name: _with_variables(item) for name, item in value.items()}
    name = str(value["env"])
    if name not in os.environ:
        raise InputError(
            f"the environment variable {name}, which the options of the store name, is not set in "
            "the process that the Pipes client started",
            next_step="set it there",
        )
    return os.environ[name]


def _compact(asked: Asked) -> dict[str, Any]:
    from arroyo_dagster.spark.compaction import run_compaction_on_spark

    def on_merge(outcome: MergeOutcome, left: int) -> None:
        asked.partial.setdefault("merges", []).append(plain_values(outcome))

    outcome = run_compaction_on_spark(
        asked.session,
        asked.store(),
        asked.paths(),
        value_from_json(CompactionSettings, asked.request["settings"]),
        CompactionOptions(
            **asked.request["options"],
            on_lease=asked.log,
            on_merge=on_merge,
            on_progress=progress_logger(asked.log),
        ),
        thresholds=asked.spark.thresholds,
    )
    asked.partial.pop("merges", None)  # the outcome has them
    return {"outcome": plain_values(outcome)}


def _run_gc(asked: Asked) -> dict[str, Any]:
    from arroyo_dagster.spark.gc import run_gc_on_spark

    request = asked.request
    approved = request["approved_plan"]
    retention, api = request["retention"], request["arroyo_api_url"]
    outcome = run_gc_on_spark(
        asked.session,
        asked.store(),
        asked.paths(),
        GcRequest(
            kind=PlanKind(request["kind"]),
            retention=None if retention is None else value_from_json(Retention, retention),
            grace_micros=request["grace_micros"],
            purge_after_micros=request["purge_after_micros"],
            directory=open_directory(api=api, token=os.environ.get("ARROYO_API_TOKEN")),
        ),
        GcOptions(
            **request["options"],
            on_lease=asked.log,
            on_progress=progress_logger(asked.log),
            make_plan=plan_gc if approved is None else functools.partial(_approved, approved),
        ),
        thresholds=asked.spark.thresholds,
    )
    fields = {
        field.name: plain_values(getattr(outcome, field.name))
        for field in dataclasses.fields(outcome)
        if field.name != "plan"
    }
    return {"outcome": fields, "plan": gc_plan_to_json(outcome.plan)}


def _approved(digest: str, *given: Any, **options: Any) -> GcPlan:
    """Make the plan that a person has approved."""
    plan = plan_gc(*given, **options)
    if plan.digest != digest:
        raise ConflictError(
            f"plan {digest} was approved, but the current plan is {plan.digest}; nothing was "
            "deleted",
            job=plan.paths.root,
            next_step="review the new plan and approve it",
        )
    return plan


def _command(asked: Asked) -> dict[str, Any]:
    """Run a command of `arroyo-state`; the answer is the JSON document that it prints."""
    from arroyo_dagster.cli import main

    arguments = [*map(str, asked.request["arguments"]), "--json"]
    printed, lines = io.StringIO(), LogLines(asked.log)
    with redirect_stdout(printed), redirect_stderr(lines):
        try:
            code = main(arguments, prog_name="arroyo-state", standalone_mode=False) or 0
        except click.ClickException as error:
            raise InputError(error.format_message()) from error
    if code == EXIT_INTERRUPTED:
        raise KeyboardInterrupt
    if code == 0:
        return {"document": json.loads(printed.getvalue() or "{}")}
    if lines.last.startswith(_ERROR_LINE):
        raise error_from_json(json.loads(lines.last)["error"])
    raise ArroyoStateError(
        f"`arroyo-state {' '.join(arguments)}` ended with exit code {code}",
        next_step="read the log of the run",
    )


class LogLines(io.TextIOBase):
    """A text stream that logs each line, but for an error in JSON.

    Attributes:
        last: the last line.
    """

    def __init__(self, log: Callable[[str], object]) -> None:
        self.last = ""
        self._log = log
        self._rest = ""

    def writable(self) -> bool:
        """Return True, as a text stream for output does."""
        return True

    def write(self, text: str) -> int:
        """Log the lines that end in a text, without secrets."""
        *lines, self._rest = (self._rest + text).split("\n")
        for line in filter(str.strip, lines):
            self.last = line
            if not line.startswith(_ERROR_LINE):
                self._log(redact_text(line))
        return len(text)

    def close(self) -> None:
        """Log what has no end of line."""
        if not self.closed:
            self.write("\n")
        super().close()
