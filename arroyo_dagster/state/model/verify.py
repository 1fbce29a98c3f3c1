"""Settings of a verification."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from arroyo_dagster.errors import InputError
from arroyo_dagster.state.model.keys import MAX_PARALLELISM, key_range_size
from arroyo_dagster.state.model.settings import Setting

MAX_LEVEL = 4
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
            maximum=MAX_PARALLELISM,
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
            key_range_size(self.parallelism)
