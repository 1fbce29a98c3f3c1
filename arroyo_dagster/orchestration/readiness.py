"""Checks of the Dagster instance of this machine: what is on, which daemons run, how it polls."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Sequence

import dagster as dg
from dagster import DagsterInstance

from arroyo_dagster.errors import InputError
from arroyo_dagster.orchestration.sensor import decode_cursor, decode_poll
from arroyo_dagster.redaction import redact_text
from arroyo_dagster.state.operations.verify.store import CheckStatus, StoreCheck
from arroyo_dagster.state.planning.polling import TICK_SECONDS, poll_interval_seconds, quiet_poll

_DAGSTER, _DAEMONS, _SENSOR = "dagster", "daemons", "sensor"
_ALIVE_SECONDS = 300  # each daemon sends a heartbeat every 30 seconds
_CHECKPOINT_SENSOR = "_checkpoint_sensor"


def check_instance() -> tuple[StoreCheck, ...]:
    """Check the instance of DAGSTER_HOME: schedules and sensors, daemons, requests of the sensor.

    An instance knows the schedules and sensors that were switched at least once. Writes nothing of
    its own.
    """
    try:
        with dg.DagsterInstance.get() as instance:
            states = list(instance.all_instigator_state())
            on = [state for state in states if state.is_running]
            return _switched(states), _daemons(instance, needed=bool(on)), _sensors(on)
    except dg.DagsterError as error:
        detail = redact_text(str(error).splitlines()[0])
        step = "set DAGSTER_HOME to the instance's folder to check it"
        return (_check(_DAGSTER, CheckStatus.NOT_CHECKED, detail, step),)
    except Exception as error:  # the instance's storage may be any database
        detail = redact_text(f"{type(error).__name__}: {error}".splitlines()[0])
        step = "check dagster.yaml in DAGSTER_HOME, and that its database answers"
        return (_check(_DAGSTER, CheckStatus.ERROR, detail, step),)


def _check(name: str, status: CheckStatus, detail: str, step: str | None = None) -> StoreCheck:
    return StoreCheck(name=name, status=status, detail=detail, next_step=step)


def _switched(states: Sequence[object]) -> StoreCheck:
    counts = Counter((state.instigator_type.value.lower(), state.is_running) for state in states)  # type: ignore[attr-defined]
    words = [
        f"{counts[kind, True]} {kind}s on, {counts[kind, False]} off"
        for kind in ("schedule", "sensor")
    ]
    detail = f"{dg.__version__}; {'; '.join(words)}"
    if any(state.is_running for state in states):  # type: ignore[attr-defined]
        return _check(_DAGSTER, CheckStatus.OK, detail)
    step = "switch the schedules and sensors on in Dagster's UI, under Automation"
    return _check(_DAGSTER, CheckStatus.WARNING, detail, step)


def _daemons(instance: DagsterInstance, *, needed: bool) -> StoreCheck:
    """Check that each daemon of the instance sent a heartbeat lately.

    Args:
        needed: whether a schedule or sensor is on; otherwise a silent daemon is a warning only.
    """
    heartbeats = instance.get_daemon_heartbeats()
    silent, failing, alive = [], [], []
    for kind in instance.get_required_daemon_types():
        heartbeat, name = heartbeats.get(kind), kind.lower()
        if heartbeat is None:
            silent.append(f"{name} never ran")
        elif (age := time.time() - heartbeat.timestamp) > _ALIVE_SECONDS:
            silent.append(f"{name} was last heard of {age / 60:.0f} minutes ago")
        elif heartbeat.errors:
            lines = str(heartbeat.errors[0].message).strip().splitlines()
            failing.append(f"{name} fails: {redact_text(lines[0] if lines else 'unknown error')}")
        else:
            alive.append(name)
    running = [f"running: {', '.join(alive)}"] if alive else []
    detail = "; ".join([*silent, *failing, *running])
    if silent:
        status = CheckStatus.ERROR if needed else CheckStatus.WARNING
        step = "start `dagster-daemon run` for this instance: without it no sensor or schedule runs"
        return _check(_DAEMONS, status, detail, step)
    if failing:
        step = "read the log of `dagster-daemon run`"
        return _check(_DAEMONS, CheckStatus.WARNING, detail, step)
    return _check(_DAEMONS, CheckStatus.OK, detail)


def _sensors(on: Iterable[object]) -> StoreCheck:
    """Check that no checkpoint sensor polls more often than its number of jobs suggests."""
    details: list[str] = []
    too_often: list[str] = []
    for state in on:
        name, data = state.instigator_name, state.instigator_data  # type: ignore[attr-defined]
        if not (name.startswith("arroyo_") and name.endswith(_CHECKPOINT_SENSOR)):
            continue
        text = getattr(data, "cursor", None)
        try:
            jobs = len(decode_cursor(text).positions)
        except InputError:
            jobs = 0
        if not jobs:
            details.append(f"{name} has not polled yet")
            continue
        seconds = decode_poll(text)[1] or getattr(data, "min_interval", None) or TICK_SECONDS
        details.append(f"{name} polls {jobs} jobs every {seconds} s: {quiet_poll(jobs, seconds)}")
        if seconds < poll_interval_seconds(jobs):
            too_often.append(f"{name}: {poll_interval_seconds(jobs)}")
    if not details:
        return _check(_SENSOR, CheckStatus.NOT_CHECKED, "no checkpoint sensor is on")
    if too_often:
        step = (
            f"leave `interval_seconds` out, or set it to at least this ({'; '.join(too_often)}), "
            "unless it is intended"
        )
        return _check(_SENSOR, CheckStatus.WARNING, "; ".join(details), step)
    return _check(_SENSOR, CheckStatus.OK, "; ".join(details))
