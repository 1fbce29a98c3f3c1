"""Settings of a verification, and of an audit of many jobs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from arroyo_dagster.errors import InputError
from arroyo_dagster.state.model.keys import MOST_SUBTASKS, check_subtasks
from arroyo_dagster.state.model.settings import Setting

MAX_LEVEL = 4
_MINUTE = 60_000_000
HISTORY = 32
"""How many epochs before the verified one are checked by default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifySettings:
    """How closely an epoch is verified.

    Attributes:
        level: 0 = every listed file exists; 1 = footers, columns, row counts; 2 = statistics match
            the rows; 3 = every value decodes; 4 = a restore is simulated.
        parallelism: of the restored job; None = each operator's own.
        history: check this many visible epochs before it.

    Raises:
        InputError: a number out of its range.
    """

    level: Annotated[
        int,
        Setting(
            minimum=0,
            maximum=MAX_LEVEL,
            help="0: files exist. 1: footers, columns, row counts. 2: statistics match the rows. "
            "3: every value decodes. 4: a simulated restore. Each level includes those before it.",
        ),
    ] = MAX_LEVEL
    parallelism: Annotated[
        int | None,
        Setting(
            minimum=1,
            maximum=MOST_SUBTASKS,
            metavar="P",
            help="Parallelism of the restored job. Default: each operator's own.",
        ),
    ] = None
    history: Annotated[
        int,
        Setting(
            minimum=0,
            metavar="N",
            help="How many earlier epochs to check for lost or duplicated files.",
        ),
    ] = HISTORY

    def __post_init__(self) -> None:
        if not 0 <= self.level <= MAX_LEVEL or self.history < 0:
            raise InputError(
                f"level or history out of range: expected a level from 0 to {MAX_LEVEL}, a "
                "history of 0 or more",
                level=self.level,
                history=self.history,
            )
        if self.parallelism is not None:
            check_subtasks(self.parallelism)


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditSettings:
    """How closely jobs are audited, how long, and what counts as a finding."""

    level: Annotated[
        int, Setting(minimum=0, maximum=MAX_LEVEL, help="The level of `verify` for each job.")
    ] = MAX_LEVEL
    budget_micros: Annotated[
        int,
        Setting(
            config="budget_minutes",
            scale=_MINUTE,
            fractions=True,
            above=0,
            help="Begin to verify no further job after this many minutes.",
        ),
    ] = 60 * _MINUTE
    orphan_bytes: Annotated[
        int,
        Setting(
            config="orphan_mb",
            scale=1 << 20,
            minimum=0,
            help="The maximum size of a job's files that no epoch lists, in MiB.",
        ),
    ] = 1 << 30
    abandoned_attempts: Annotated[
        int,
        Setting(minimum=1, help="The maximum number of a job's checkpoints that no epoch names."),
    ] = 100
    hot_key_percent: Annotated[
        int,
        Setting(
            minimum=1,
            maximum=100,
            help="A key is hot if it has this percentage of a table's rows, and four times as many "
            "as the mean.",
        ),
    ] = 20
    hot_key_rows: Annotated[int, Setting(minimum=1, help="Smaller tables have no hot keys.")] = (
        100_000
    )
