"""`serve`: do what a run of Dagster asks for through Pipes, and send the answer back.

Exit code 0 says that the answer was sent, also if it is an error: the run then fails with it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
import traceback
from typing import TYPE_CHECKING, Any

from arroyo_dagster.cli.common import EXIT_INTERRUPTED, error_json
from arroyo_dagster.cli.pipes.work import Asked, LogLines, do_work
from arroyo_dagster.errors import ArroyoStateError, InputError
from arroyo_dagster.optional_packages import explained_imports
from arroyo_dagster.redaction import redact_text, redacted_cause
from arroyo_dagster.spark.settings import SparkSettings
from arroyo_dagster.state.codec.messages import REQUEST, split_document

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
