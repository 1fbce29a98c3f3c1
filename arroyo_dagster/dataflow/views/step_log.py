"""The last failures and messages of the steps of a dataflow, as its services published them."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from arroyo_dagster.dataflow.definition.definition import Dataflow
from arroyo_dagster.dataflow.definition.names import LOG
from arroyo_dagster.dataflow.storage.engine_tables import LogKey
from arroyo_dagster.dataflow.views.namespaces import stored_pairs
from arroyo_dagster.dataflow.views.view import OwnerJob, service_paths
from arroyo_dagster.errors import FormatError, InputError
from arroyo_dagster.state.storage.store import ObjectStore

_BODY_LINE = re.compile(r"in line (\d+) of the body")


@dataclass(frozen=True, slots=True, kw_only=True)
class LogEntry:
    """One record, or flush of a window, on which a step failed; or a message of its function.

    Attributes:
        service, step: where it failed, or what sent the message.
        at_ms: the clock of the epoch, in epoch milliseconds.
        epoch: the epoch of the service.
        number: which failure, or message, of the step it is, counted by each subtask from 1.
        reason: why it failed, with the line of the function; None for a message.
        message: the message; None for a failure.
        line: the line of the definition in which it failed, if the body has not changed since;
            None = the body is not in the definition, or the line is not known.
        topic, partition, offset: the position of the record; None for a flush, or a message.
        file: the file of the record, if the run kept dead letters.
    """

    service: str
    step: str
    at_ms: int
    epoch: int
    number: int
    reason: str | None = None
    message: str | None = None
    line: int | None = None
    topic: str | None = None
    partition: int | None = None
    offset: int | None = None
    file: str | None = None

    @property
    def place(self) -> str:
        """The position of the record; empty if it is not known."""
        if self.topic is None:
            return ""
        file = "" if self.file is None else f" {self.file}"
        return f"{self.topic}{file} {self.partition}/{self.offset}"


def read_step_log(
    store: ObjectStore, dataflow: Dataflow, *, service: str | None = None
) -> list[LogEntry]:
    """Return the last failures and messages of each step, the oldest first.

    Each service is read at its newest ready epoch. Those of epochs that were not published are
    not in it.

    Args:
        store: the object store of the states.
        dataflow: the definition.
        service: only this service; None = all.

    Raises:
        InputError: there is no such service.
        CheckpointError: the newest epoch of a service cannot be read (E51).
        FormatError: an entry of the log is not one.
    """
    if service is not None and service not in dataflow.services:
        raise InputError(
            f"the dataflow has no service `{service}`", services=sorted(dataflow.services)
        )
    log: list[LogEntry] = []
    for name in dataflow.services if service is None else (service,):
        lines = {step.name: step.body_line for step in dataflow.services[name].steps}
        head = OwnerJob(store, service_paths(dataflow, name)).newest()
        for operator in head.operators if head is not None else ():
            stored = stored_pairs(store, head, operator.operator, LOG, LogKey, str)
            for key, text in stored.items():
                log.append(_entry(name, key.name, text, lines.get(key.name)))
    return sorted(log, key=lambda e: (e.at_ms, e.service, e.epoch, e.step, e.number))


def _entry(service: str, step: str, text: str, body_line: int | None) -> LogEntry:
    try:
        stored: dict[str, Any] = json.loads(text)
        entry = LogEntry(
            service=service, step=step, line=_line(stored.get("reason"), body_line), **stored
        )
    except (ValueError, TypeError, KeyError) as error:
        raise FormatError(
            f"an entry of the log of {service}/{step} is not one ({error!r})"
        ) from error
    return entry


def _line(reason: str | None, body_line: int | None) -> int | None:
    match = _BODY_LINE.search(reason or "")
    return None if match is None or body_line is None else body_line + int(match[1]) - 1
