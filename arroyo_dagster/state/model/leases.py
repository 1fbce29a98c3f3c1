"""Leases as values: who holds one, and until when by the clock of the store.

How old a record is, is judged by the store's clock alone: the time now less the time at which the
store says that the record was written. So no clock of a holder, however wrong, keeps a job locked.
"""

from __future__ import annotations

from dataclasses import dataclass

from arroyo_dagster.state.model.ids import StatePath

LEASE_SECONDS = 60.0
EXPIRED_SECONDS = LEASE_SECONDS + 5
"""Who waits so long gets the lease of a process that has died, if nobody else does."""

_SECOND = 1_000_000
"""Some stores give times in whole seconds: so much more must have passed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseRecord:
    """One lease, as its object says. Times are microseconds since the Unix epoch.

    Attributes:
        token: its number; higher ones are newer.
        owner: who took it: `HOST/PID (description)`; of older releases the description alone.
        host, pid: of the process that took it; None in records of older releases.
        description: what the process does, as its caller said.
        nonce: no other acquisition has it.
        process: no other process has it; None in records of older releases.
        duration_micros: so long after it was renewed it expires.
        renewed_at_micros: when it was last renewed, by the store's clock; None if it gives no time.
        expires_at_micros: when it expires, by the holder's clock: counts only where the store gives
            no times. 0 = it was given back.
    """

    path: StatePath
    token: int
    owner: str
    host: str | None
    pid: int | None
    description: str
    nonce: str
    process: str | None
    duration_micros: int
    renewed_at_micros: int | None
    expires_at_micros: int

    @property
    def released(self) -> bool:
        """Whether its holder is done: then it is free at once."""
        return self.expires_at_micros == 0

    def held_until(self, store_micros: int | None, here_micros: int) -> int | None:
        """When it expires if nobody renews it; None if it is free.

        Args:
            store_micros: the time by the store's clock; None if it gives no times.
            here_micros: the time here; counts only where the store's does not.
        """
        if self.released:
            return None
        renewed = self.renewed_at_micros
        # A time in the future says nothing: the store's clock was set back.
        if not store_micros or not renewed or renewed > store_micros + _SECOND:
            return self.expires_at_micros if self.expires_at_micros > here_micros else None
        until = renewed + self.duration_micros + _SECOND
        return until if until > store_micros else None
