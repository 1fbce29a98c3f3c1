"""Check of the Dagster instance of this machine: which schedules and sensors are on."""

from __future__ import annotations

from collections import Counter

import dagster as dg

from arroyo_dagster.redaction import redact_text
from arroyo_dagster.state.operations.verify.store import CheckStatus, StoreCheck

_NAME = "dagster"


def check_instance() -> StoreCheck:
    """Check which schedules and sensors are on in the instance of DAGSTER_HOME.

    An instance knows those that were switched at least once. Writes nothing of its own.
    """
    try:
        with dg.DagsterInstance.get() as instance:
            states = instance.all_instigator_state()
    except dg.DagsterError as error:
        status, detail = CheckStatus.NOT_CHECKED, redact_text(str(error).splitlines()[0])
        step = "set DAGSTER_HOME to the instance's folder to check it"
        return StoreCheck(name=_NAME, status=status, detail=detail, next_step=step)
    except Exception as error:  # the instance's storage may be any database
        detail = redact_text(f"{type(error).__name__}: {error}".splitlines()[0])
        step = "check dagster.yaml in DAGSTER_HOME, and that its database answers"
        return StoreCheck(name=_NAME, status=CheckStatus.ERROR, detail=detail, next_step=step)
    counts = Counter((one.instigator_type.value.lower(), one.is_running) for one in states)
    words = [
        f"{counts[kind, True]} {kind}s on, {counts[kind, False]} off"
        for kind in ("schedule", "sensor")
    ]
    detail = f"{dg.__version__}; {'; '.join(words)}"
    if any(one.is_running for one in states):
        return StoreCheck(name=_NAME, status=CheckStatus.OK, detail=detail)
    step = "switch the schedules and sensors on in Dagster's UI, under Automation"
    return StoreCheck(name=_NAME, status=CheckStatus.WARNING, detail=detail, next_step=step)
