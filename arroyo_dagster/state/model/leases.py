"""Leases as values: the holder, and the expiry by the clock of the store.

Only the store's clock determines the age of a record: its present time minus the time at which it
wrote the record. A wrong clock of a holder thus never keeps a job locked.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from arroyo_dagster.state.model.ids import StatePath
from arroyo_dagster.state.model.json_fields import NOT_STORED
from arroyo_dagster.state.model.settings import Setting

LEASE_SECONDS = 60.0
EXPIRED_SECONDS = LEASE_SECONDS + 5
"""A process that waits this long gets a dead process's lease, unless another process gets it."""

_SECOND = 1_000_000
"""Added to the expiry, since some stores report times in whole seconds."""


MAX_CHECKPOINT_SLOWDOWN = 2.0
SLOWDOWN_SETTING = Setting(
    fractions=True,
    above=1,
    help="Back off once a running job's checkpoints take more than this many times as long as "
    "before the maintenance.",
)
"""How compaction and gc give way to the job."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseSettings:
    """How long maintenance waits for another process that maintains the same job.

    Attributes:
        lease_wait_seconds: then the job is skipped. The default outlasts the lease of a process
            that has died.
    """

    lease_wait_seconds: Annotated[
        float,
        Setting(
            option="lease-wait",
            fractions=True,
            minimum=0,
            metavar="SECONDS",
            help="How many seconds to wait for another process that maintains the job. After that "
            "the job is skipped.",
        ),
    ] = EXPIRED_SECONDS


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseRecord:
    """One lease, as stored in its object. Times are microseconds since the Unix epoch.

    Attributes:
        token: its number; higher numbers are newer.
        owner: who acquired it: `HOST/PID (description)`.
        host, pid: of the process that acquired it.
        description: what the process does, as its caller described it.
        nonce: unique for every acquisition.
        process: unique for every process.
        duration_micros: the time from a renewal to the expiry.
        acquired_at_micros: when it was acquired, by the holder's clock.
        renewed_at_micros: when it was last renewed, by the store's clock; None if the store reports
            no time.
        expires_at_micros: when it expires, by the holder's clock; used only if the store reports no
            times. 0 = it was released.
    """

    path: Annotated[StatePath, NOT_STORED]
    token: int
    owner: str
    host: str
    pid: int
    description: str
    nonce: str
    process: str
    duration_micros: int
    acquired_at_micros: int
    renewed_at_micros: Annotated[int | None, NOT_STORED]
    expires_at_micros: int

    @property
    def released(self) -> bool:
        """Whether its holder has released it, so that it is free."""
        return self.expires_at_micros == 0

    def held_until(self, store_micros: int | None, here_micros: int) -> int | None:
        """Return when it expires unless it is renewed; None if it is free.

        Args:
            store_micros: the time by the store's clock; None if the store reports no times.
            here_micros: the time by this machine's clock; used only without the store's.
        """
        if self.released:
            return None
        renewed = self.renewed_at_micros
        # A renewal in the future is unusable: the store's clock was set back.
        if not store_micros or not renewed or renewed > store_micros + _SECOND:
            return self.expires_at_micros if self.expires_at_micros > here_micros else None
        until = renewed + self.duration_micros + _SECOND
        return until if until > store_micros else None
