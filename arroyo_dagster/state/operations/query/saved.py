"""Saved queries: SQL in the package with parameters, for what people ask again and again.

A file of `saved_queries` begins with comments: what it answers; `JOB`, `[JOB]` or nothing, whether
it is of one job, of one or all jobs, or of no job; then a line for each parameter,
`:NAME KIND DEFAULT HELP`. Its tables are named with parameters, too: `:job.pins` is of the job that
is asked for, `:history.offsets` of its newest `:epochs` epochs.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cache
from pathlib import Path

from arroyo_dagster.errors import InputError, NotFoundError
from arroyo_dagster.state.model.numbers import parse_number

_FOLDER = Path(__file__).parent / "saved_queries"
_PARAMETER = re.compile(r"-- :(\w+) (\w+) (\S+) (.+)")
_REQUIRED, _NULL = "required", "null"
JOB, HISTORY, EPOCHS, PARALLELISM = "job", "history", "epochs", "parallelism"


class JobArgument(Enum):
    """Whether a saved query takes a job."""

    ONE_JOB = "JOB"
    ANY_JOB = "[JOB]"
    NO_JOB = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryParameter:
    """A parameter of a saved query.

    Attributes:
        kind: `integer`, not negative; `number`; `text`; or `name`, of a table or a part of it.
        default: its text; None = it must be given. `null` = it has no value.
    """

    name: str
    kind: str
    default: str | None
    help: str

    def literal(self, text: str) -> str:
        """Return a value as SQL has it.

        Raises:
            InputError: it is not of this kind.
        """
        if self.kind == "name":
            escaped = text.replace('"', '""')
            return f'"{escaped}"'
        if self.kind == "text":
            escaped = text.replace("'", "''")
            return f"'{escaped}'"
        value = parse_number(text) if self.kind == "integer" else _number(text)
        if value is None or value >= 2**63 or (self.name in (EPOCHS, PARALLELISM) and value < 1):
            least = ", 1 or more" if self.name in (EPOCHS, PARALLELISM) else ""
            raise InputError(
                f"the parameter {self.name} cannot be {text!r}", expected=f"{self.kind}{least}"
            )
        return str(value)


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedQuery:
    """A saved query; `description` says what it answers."""

    name: str
    description: str
    usage: JobArgument
    parameters: tuple[QueryParameter, ...]
    sql: str

    @property
    def synopsis(self) -> str:
        """How it is called: `@name JOB`."""
        return f"@{self.name} {self.usage.value}".rstrip()

    def bind(
        self, job: str | None, values: Mapping[str, str], *, of_epoch: bool = False
    ) -> tuple[str, int | None]:
        """Return the query of a job, or of all jobs, with values in place of its parameters.

        Its tables have their full names. The number is the parallelism of the subtasks that it
        shows; None = of each operator.

        Args:
            job: `JOB` or `JOB@EPOCH`; None = all jobs.
            values: texts by the name of the parameter.
            of_epoch: `job` names an epoch, so that only this one is compared.

        Raises:
            InputError: a parameter is unknown, missing or not of its kind; or a job is missing, or
                not of use.
        """
        by_name = {parameter.name: parameter for parameter in self.parameters}
        unknown = sorted(values.keys() - by_name.keys())
        if unknown:
            raise self._refused(f"there is no parameter {unknown[0]!r}")
        literals: dict[str, str] = {}
        for name, parameter in by_name.items():
            text = values.get(name, parameter.default)
            if text is None:
                raise self._refused(f"the parameter {name!r} is missing")
            is_null = name not in values and text == _NULL
            literals[name] = _NULL if is_null else parameter.literal(text)
        if job is None and self.usage is JobArgument.ONE_JOB:
            raise self._refused("name a job")
        if job is not None and self.usage is JobArgument.NO_JOB:
            raise self._refused("the query takes no job")
        epochs, parallelism = literals.get(EPOCHS), literals.get(PARALLELISM, _NULL)
        sql = self._replaced(literals | _tables(job, None if of_epoch else epochs))
        return sql, None if parallelism == _NULL else int(parallelism)

    def _replaced(self, literals: Mapping[str, str]) -> str:
        from arroyo_dagster.state.operations.query.sql_text import sql_tokens  # loads polars

        replaced: list[str] = []
        for token in sql_tokens(self.sql):
            if token.kind == "parameter":
                replaced.append(literals[token.text[1:]])
            elif token.text != "." or not replaced or replaced[-1]:
                replaced.append(token.text)  # without a job, its dot goes, too
        return "".join(replaced)

    def _refused(self, what: str) -> InputError:
        listed = ", ".join(
            f"{one.name} (required)" if one.default is None else one.name for one in self.parameters
        )
        return InputError(
            f"{what} for the saved query @{self.name}",
            expected=f"{self.synopsis}, with the parameters: {listed or 'none'}",
            next_step="`arroyo-state sql --list` prints the saved queries and their parameters",
        )


def _tables(job: str | None, epochs: str | None) -> dict[str, str]:
    """Return the first part of the names of tables: quoted, or empty for all jobs."""
    if job is None:
        return {JOB: "", HISTORY: ""}
    named = QueryParameter(name=JOB, kind="name", default=None, help="")
    history = job if epochs is None else f"{job}@newest {epochs}"
    return {JOB: named.literal(job), HISTORY: named.literal(history)}


@cache
def saved_queries() -> Mapping[str, SavedQuery]:
    """Return the saved queries of the package by name."""
    return {path.stem: _parsed(path) for path in sorted(_FOLDER.glob("*.sql"))}


def _parsed(path: Path) -> SavedQuery:
    text = path.read_text(encoding="utf-8")
    header = [line for line in text.splitlines() if line.startswith("--")]
    parameters = [_PARAMETER.fullmatch(line) for line in header[2:]]
    return SavedQuery(
        name=path.stem,
        description=header[0].removeprefix("-- "),
        usage=JobArgument(header[1].removeprefix("--").strip()),
        parameters=tuple(
            QueryParameter(
                name=match[1],
                kind=match[2],
                default=None if match[3] == _REQUIRED else match[3],
                help=match[4],
            )
            for match in parameters
            if match is not None
        ),
        sql="\n".join(text.splitlines()[len(header) :]),
    )


def find_saved(name: str) -> SavedQuery:
    """Return a saved query by its name.

    Raises:
        NotFoundError: there is none; lists all.
    """
    queries = saved_queries()
    if name not in queries:
        raise NotFoundError(
            f"there is no saved query @{name}",
            saved_queries=", ".join(f"@{existing}" for existing in queries),
            next_step="`arroyo-state sql --list` prints what each answers",
        )
    return queries[name]
