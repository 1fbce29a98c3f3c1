"""The driver's knowledge of which process holds each subtask of a run."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from arroyo_dagster.spark.holders.channel import HolderAddress, Secret
from arroyo_dagster.spark.holders.messages import Meeting, Placed

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_IDLE_SECONDS = 900.0
"""How long holders wait at least for the next epoch."""

_ENCRYPTED = (
    "spark.network.crypto.enabled",
    "spark.authenticate.enableSaslEncryption",
    "spark.ssl.enabled",
    "spark.ssl.rpc.enabled",
)

_SECRETS: list[Secret] = []


def driver_secret() -> Secret:
    """Return the secret of this process. Its runs share holders, which take a second to start."""
    if not _SECRETS:
        _SECRETS.append(Secret.new())
    return _SECRETS[0]


def driver_host(session: SparkSession) -> str | None:
    """Return the host of the driver, if tasks may reach holders of other hosts; else None.

    They may not where Spark encrypts its own connections: those to holders are not encrypted.
    """

    def setting(name: str) -> str:
        return session.conf.get(name, "") or ""

    if setting("spark.master").startswith("local") or any(
        setting(name) == "true" for name in _ENCRYPTED
    ):
        return None
    return setting("spark.driver.host") or None


class Placement:
    """Where the subtasks of one run are held, as their tasks report it.

    Args:
        parallelism: the number of subtasks of each level.
        slots: how many tasks Spark runs at a time.
        driver_host: see `Meeting`.
    """

    def __init__(
        self, secret: Secret, parallelism: int, slots: int, driver_host: str | None
    ) -> None:
        self._secret = secret
        self._wanted = min(parallelism, slots)
        self._driver_host = driver_host
        self._holders: dict[tuple[int, int], HolderAddress] = {}
        self._alive: dict[str, HolderAddress] = {}
        self._balanced: set[tuple[int, int]] = set()
        self._longest_gap_seconds = 0.0
        self._last_epoch = time.monotonic()

    def meeting(self, *, then_stop: bool) -> Meeting:
        """Return what the tasks of the next epoch need.

        Args:
            then_stop: the epoch is the last of the run.
        """
        now = time.monotonic()
        self._longest_gap_seconds = max(self._longest_gap_seconds, now - self._last_epoch)
        self._last_epoch = now
        idle_seconds = _IDLE_SECONDS + (0 if then_stop else 3 * self._longest_gap_seconds)
        start = len(self._alive) < self._wanted
        return Meeting(self._secret, self._driver_host, idle_seconds, start)

    def of_level(self, level: int) -> Mapping[int, HolderAddress]:
        """Return the holder of each subtask of a level; of none before the first epoch."""
        return {subtask: holder for (of, subtask), holder in self._holders.items() if of == level}

    def learn(self, placed: Sequence[Placed]) -> None:
        """Take over what the tasks of an epoch report, and spread subtasks if they are uneven."""
        ran = {task.holder.holder: task.holder for task in placed if task.holder is not None}
        blocked = {task.lost.holder for task in placed if task.lost is not None and task.blocked}
        if blocked & ran.keys():
            # Hosts do not reach each other's holders. Each serves the tasks of its own.
            self._driver_host = None
        lost = {task.lost.holder for task in placed if task.lost is not None} - ran.keys()
        own = {task.own.holder: task.own for task in placed if task.own is not None}
        self._alive = {name: address for name, address in (own | ran).items() if name not in lost}
        self._holders = {
            (task.level, task.subtask): task.holder for task in placed if task.holder is not None
        }
        for level in {task.level for task in placed}:
            self._spread(level)

    def _spread(self, level: int) -> None:
        """Assign subtasks of the process that has most to the one that has fewest.

        Each once in a run, as the process that takes one over restores it.
        """
        subtasks: dict[str, list[int]] = {name: [] for name in self._alive}
        for (of, subtask), holder in sorted(self._holders.items()):
            if of == level and holder.holder in subtasks:
                subtasks[holder.holder].append(subtask)
        while len(subtasks) > 1:
            most = max(subtasks, key=lambda name: len(subtasks[name]))
            fewest = min(subtasks, key=lambda name: len(subtasks[name]))
            free = [subtask for subtask in subtasks[most] if (level, subtask) not in self._balanced]
            if len(subtasks[most]) - len(subtasks[fewest]) < 2 or not free:
                return
            subtasks[most].remove(free[-1])
            subtasks[fewest].append(free[-1])
            self._balanced.add((level, free[-1]))
            self._holders[level, free[-1]] = self._alive[fewest]
