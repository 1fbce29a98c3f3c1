"""What all subcommands share: common options, opening the store, printing errors."""

from __future__ import annotations

import errno
import functools
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import click

from arroyo_dagster import __version__
from arroyo_dagster.cli.commands import MAIN, SECTIONS
from arroyo_dagster.cli.config import read_defaults
from arroyo_dagster.cli.lazy import LazyGroup
from arroyo_dagster.errors import ArroyoStateError, InputError, LeaseHeldError
from arroyo_dagster.optional_packages import explain_import
from arroyo_dagster.redaction import (
    redact_text,
    redacted_cause,
    register_settings,
    register_url,
    without_secrets,
)

if TYPE_CHECKING:
    from arroyo_dagster.state.model.layout import JobPaths
    from arroyo_dagster.state.planning.privacy import PrivateColumns
    from arroyo_dagster.state.storage.store import ObjectStore

EXIT_FINDINGS = 3
"""At least one finding is an error. 1 means that the check could not be carried out."""

EXIT_SKIPPED = 4
"""Another process maintains the job, so that nothing was done: call the command again later. Of
`sdf run` and `sdf replay`: the run ended, and records of it failed."""

URL_VARIABLES = ["ARROYO__CHECKPOINT_URL", "CHECKPOINT_URL"]
DELETE_VARIABLE = "ARROYO_DELETE_OPTIONS"
PRIVATE_VARIABLE = "ARROYO_PRIVATE_COLUMNS"

EXIT_INTERRUPTED = 130
"""As of a process that SIGINT has ended."""

EXIT_CLOSED = 141
"""As of a process that SIGPIPE has ended: the reader of the output closed it."""

_NO_PATH = (errno.ENAMETOOLONG, errno.ELOOP)
"""Errors of a path that no system can have; whoever tests whether it exists does not expect them.
"""

WIDE = "arroyo_dagster.wide"
"""Where the context of a command says that `--wide` was given."""

_JSON = "arroyo_dagster.json"
_INTERRUPTED = "arroyo_dagster.interrupted"


_F = TypeVar("_F", bound=Callable[..., Any])


class _Commands(LazyGroup):
    """Shows the errors of this package as one message on stderr, without a traceback.

    No message, nor the traceback of any other error, holds a secret.
    """

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        for number, text in enumerate(args, 1):
            if not text.isascii() and any("\ud800" <= letter <= "\udfff" for letter in text):
                ctx.fail(f"Argument {number} is not valid UTF-8: {ascii(text)[:80]}")
        return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        # A URL in place of a command is among the protected ones, by which click means the first.
        for word in [*getattr(ctx, "_protected_args", ()), *ctx.args]:
            if "://" in word:
                register_url(word)
        try:
            ctx.obj = functools.partial(read_defaults, self)
            return super().invoke(ctx)
        except ArroyoStateError as error:
            print_error(error)
            ctx.exit(exit_code([error]))
        except click.ClickException as error:
            error.message = redact_text(error.message)  # type: ignore[misc] # who else may say it
            raise
        except KeyboardInterrupt:
            # Print one sentence: what an interrupted command leaves behind.
            state = ctx.meta.get(_INTERRUPTED, "nothing was changed")
            click.echo(f"\ninterrupted: {state}", err=True)
            ctx.exit(EXIT_INTERRUPTED)
        except BrokenPipeError:
            # Python flushes at exit: what is left goes nowhere, without a second error.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            ctx.exit(EXIT_CLOSED)
        except OSError as error:
            if error.errno not in _NO_PATH:
                raise
            print_error(InputError(f"{error.strerror}: {error.filename!s:.80}…"))
            ctx.exit(1)
        except (click.exceptions.Exit, click.Abort):
            raise  # an exit code, no error: what it was raised beside is nobody's business
        except Exception as error:
            missing = explain_import(error)
            if missing is not None:
                print_error(missing)
                ctx.exit(1)
            cause = redacted_cause(error)
            if cause is error:
                raise
            raise cause  # noqa: B904 - what it stands for holds a secret


def if_interrupted(state: str) -> None:
    """Set what Ctrl-C prints from here on: what is left, and what continues it."""
    context = click.get_current_context(silent=True)
    if context is not None:
        context.meta[_INTERRUPTED] = state


def exit_code(problems: Sequence[ArroyoStateError]) -> int:
    """Return the exit code of a command with these problems, of which there is at least one."""
    return EXIT_SKIPPED if all(isinstance(problem, LeaseHeldError) for problem in problems) else 1


def print_error(error: ArroyoStateError) -> None:
    if bool(click.get_current_context().meta.get(_JSON)):
        click.echo(json.dumps({"error": error_json(error)}, ensure_ascii=False), err=True)
    else:
        kind = "skipped" if isinstance(error, LeaseHeldError) else type(error).__name__
        click.echo(without_secrets(f"{kind}: {error}"), err=True)


def error_json(error: ArroyoStateError) -> dict[str, Any]:
    """Convert an error to JSON values without secrets; `error_from_json` is the inverse."""
    facts = {
        name: value if isinstance(value, int | float | None) else without_secrets(str(value))
        for name, value in error.facts.items()
    }
    return {
        "type": type(error).__name__,
        "message": without_secrets(error.message),
        "facts": facts,
        "next_step": error.next_step and without_secrets(error.next_step),
        "retryable": error.retryable,
    }


def _remember_json(ctx: click.Context, _: click.Parameter, value: bool) -> bool:
    ctx.meta[_JSON] = value  # shared with the group, which shows errors
    return value


def wants_colour() -> bool:
    return not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def _remember_wide(ctx: click.Context, _: click.Parameter, value: bool) -> None:
    ctx.meta[WIDE] = value


def json_option(command: _F) -> _F:
    """Add `--json` and `--wide`, for every subcommand that lists something."""
    wide = click.option(
        "--wide",
        is_flag=True,
        expose_value=False,
        callback=_remember_wide,
        help="Print to a terminal as to a file: every column in full, on lines of any length.",
    )
    option = click.option(
        "--json",
        "as_json",
        is_flag=True,
        is_eager=True,
        callback=_remember_json,
        help="Print one JSON document.",
    )
    return option(wide(command))


def store_options(command: _F) -> _F:
    """Add `--url`, `--json` and `--wide`, for every subcommand that reads a checkpoint URL."""
    url_option = click.option(
        "--url",
        envvar=URL_VARIABLES,
        help="The checkpoint URL, in any form that Arroyo takes. Default: ARROYO__CHECKPOINT_URL.",
    )
    return url_option(json_option(command))


def private_option(command: _F) -> _F:
    """Add `--private`, for every subcommand that prints values of the state.

    What the environment and the configuration file name stays private: an option only adds to it.
    """
    option = click.option(
        "--private",
        multiple=True,
        metavar="COLUMN",
        callback=_private_columns,
        help="Mask this column, for example email, orders.email or orders.*. May be repeated. Adds "
        f"to the columns in {PRIVATE_VARIABLE} (separated by commas) and in the configuration "
        "file.",
    )
    return option(command)


def _private_columns(
    ctx: click.Context, option: click.Parameter, value: tuple[str, ...]
) -> PrivateColumns:
    from arroyo_dagster.state.planning.privacy import PrivateColumns

    named = os.environ.get(PRIVATE_VARIABLE, "").split(",")
    configured = ctx.lookup_default(str(option.name)) or ()
    return PrivateColumns.of([*filter(str.strip, named), *configured, *value])


def open_url(url: str | None) -> ObjectStore:
    from arroyo_dagster.state.storage.remote.open import configure, get_storage_provider

    if_interrupted("what was changed stays valid; call the same command again to complete it")
    if url is not None:
        if ":" not in url:
            url = os.path.abspath(url)  # what a shell calls a path may be relative
        configure(url, delete_options=read_delete_options(os.environ.get(DELETE_VARIABLE)))
    return get_storage_provider(url)


def read_delete_options(given: str | None) -> dict[str, Any] | None:
    """Return the options of the client that deletes; None = one client for everything.

    Args:
        given: a JSON object, or the path of a file with one.

    Raises:
        InputError: it is neither; the message repeats nothing of it.
    """
    from arroyo_dagster.state.model.json_fields import parse_json
    from arroyo_dagster.state.storage.local_documents import read_document

    if not given:
        return None
    try:
        options = parse_json(given if given.lstrip().startswith("{") else read_document(given))
    except (OSError, ValueError) as error:
        raise InputError(
            f"{DELETE_VARIABLE} is neither a JSON object nor a file with one "
            f"({type(error).__name__})",
            next_step="write the options of a store client, as in storage_options, for example "
            '{"access_key_id": "…", "secret_access_key": "…"}',
        ) from None
    if not isinstance(options, dict):
        raise InputError(f"{DELETE_VARIABLE} contains no JSON object")
    register_settings(options)
    return options


@contextmanager
def leased(
    store: ObjectStore, paths: JobPaths, owner: str, wait_seconds: float, *, deletes: bool = False
) -> Iterator[ObjectStore]:
    """Hold the lease on a job for a command. Its operations do not take it again.

    Args:
        owner: what the command does, for people.
        wait_seconds: how long to wait for another process that maintains the job.
        deletes: as of `LeaseOptions`.

    Raises:
        LeaseHeldError: it still does; `main` exits with code 4.
    """
    from arroyo_dagster.state.metadata.lease import LeaseOptions, lease

    on_event = print_lease_event(paths)
    options = LeaseOptions(deletes=deletes, wait_seconds=wait_seconds, on_event=on_event)
    with lease(store, paths, owner, options) as held:
        yield held


def print_lease_event(paths: JobPaths) -> Callable[[str], None]:
    """Return a callback that prints on stderr what happens to the lease on a job."""
    return lambda event: click.echo(f"{paths.root}: {event}", err=True)


def open_another(url: str) -> ObjectStore:
    """Open another store than the checkpoint URL; a path of the shell may be relative."""
    from arroyo_dagster.state.storage.remote.open import open_store

    return open_store(url if ":" in url else os.path.abspath(url))


def open_to_read(url: str | None) -> ObjectStore:
    from arroyo_dagster.state.storage.wrappers import WriteProtected

    store = open_url(url)
    if_interrupted("nothing was changed")
    return WriteProtected(store)


def find_job_and_epoch(store: ObjectStore, name: str) -> tuple[JobPaths, int | None]:
    """Return the job that `JOB` or `JOB@EPOCH` names, and the epoch; None = without one.

    EPOCH is a number, `latest` or a time. That an epoch of this number exists is not checked.
    """
    from arroyo_dagster.state.model.numbers import parse_number
    from arroyo_dagster.state.operations.query.state import open_state

    state = open_state(store)
    job, text = state.find(name)
    if text is None:
        return job.paths, None
    number = parse_number(text)
    return job.paths, state.epoch(name).number if number is None else number


@click.group(
    cls=_Commands,
    lazy=MAIN,
    sections=SECTIONS,
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(__version__, prog_name="arroyo-state")
def main() -> None:
    """Inspect, compact, verify and restore the state of streaming jobs.

    JOB is a job's id, or pipeline/job where several pipelines have a job of that id.
    """
