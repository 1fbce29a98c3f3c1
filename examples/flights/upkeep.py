"""What Dagster does for the flights job: sees its epochs, compacts its files, expires old epochs.

The same assets, checks and sensor as in the UI, on an instance of its own, run in this process:
for state of this size a session of Spark would take longer than the work.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import dagster as dg
from home import dagster_home
from states import DATAFLOWS, Shown
from verify import JOB

from arroyo_dagster.errors import ArroyoStateError
from arroyo_dagster.orchestration.check_results import last_results
from arroyo_dagster.orchestration.definitions import ArroyoOptions, build_arroyo_definitions
from arroyo_dagster.orchestration.runners import InProcessRunner

QUIET = {"loggers": {"console": {"config": {"log_level": "CRITICAL"}}}}
PIPELINE = str(JOB.root)


class Upkeep:
    """The assets of the flights job, on an instance in `home`."""

    def __init__(self, url: str, *, home: Path) -> None:
        logging.disable(logging.INFO)  # the demo says what the sensor logs
        os.environ["DAGSTER_HOME"] = str(dagster_home(home))
        self._url = url
        self._options = ArroyoOptions(runner=InProcessRunner(), dataflows=DATAFLOWS)
        self._instance = dg.DagsterInstance.get()
        self._cursor: str | None = None

    def tick(self) -> str:
        """Load the definitions, and let the sensor report once. Returns what it says."""
        self._definitions = build_arroyo_definitions(
            self._url, mode="maintain", options=self._options
        )
        sensor = self._definitions.resolve_sensor_def("arroyo_checkpoint_sensor")
        with dg.build_sensor_context(
            instance_ref=self._instance.get_ref(),
            definitions=self._definitions,
            cursor=self._cursor,
            resources=self._definitions.resources,
        ) as context:
            found = sensor.evaluate_tick(context)
        self._cursor = found.cursor
        for event in found.asset_events:
            self._instance.report_runless_asset_event(event)
        return str(found.skip_message)

    def verify(self) -> str:
        """Verify every pipeline. Returns what the checks say of the flights job.

        Raises:
            ArroyoStateError: a pipeline cannot be restored.
        """
        self._run("arroyo_verify")
        key = dg.AssetCheckKey(self._key("checkpoint"), "restorable")
        result = last_results(self._instance, [key])[key]
        return f"{key.name}: {result.description}"

    def compact(self, *, policy: str, wait_seconds: float = 0.0) -> Mapping[str, Any]:
        """Merge the job's files."""
        config = {"policy": policy, "wait_seconds": wait_seconds, "min_files": 2}
        return self._run("arroyo_compaction", "compacted_state", config)

    def expire(self, keep_epochs: int) -> Mapping[str, Any]:
        """Remove the job's older epochs."""
        config = {"keep_epochs": keep_epochs, "dry_run": False}
        return self._run("arroyo_gc", "retained_epochs", config)

    def _key(self, table: str) -> dg.AssetKey:
        return dg.AssetKey(["arroyo", *PIPELINE.split("/"), table])

    def states(self) -> list[Shown]:
        """The states of dataflows, as the instance has them."""
        found = []
        for key in sorted(self._definitions.resolve_all_asset_keys()):
            event = self._instance.get_latest_materialization_event(key)
            if key.path[0] != "sdf" or key.path[3] != "state" or event is None:
                continue
            assert event.asset_materialization is not None
            said = {name: one.value for name, one in event.asset_materialization.metadata.items()}
            rows = said["first rows"].records if "first rows" in said else []
            first = [f"{name} {value}" for name, value in rows[0].data.items()] if rows else []
            shown = ", ".join(one for one in first if not one.startswith("_updated_at"))
            name = " / ".join([".".join(key.path[1:3]), *key.path[4:]])
            found.append(Shown(name, said["dagster/row_count"], said["sdf/epoch"], shown))
        return found

    def _run(
        self, job: str, table: str | None = None, config: Mapping[str, Any] | None = None
    ) -> Mapping[str, Any]:
        """Run a job, of the asset of the flights job if one is named. Returns its metadata."""
        ops = {f"arroyo_{table}": {"config": config}} if table else {}
        result = self._definitions.resolve_job_def(job).execute_in_process(
            instance=self._instance,
            asset_selection=[self._key(table)] if table else None,
            run_config={**QUIET, "ops": ops},
            raise_on_error=False,
        )
        if not result.success:
            raise ArroyoStateError(_reason(result), job=PIPELINE)
        shown: dict[str, Any] = {}
        for event in result.get_asset_materialization_events():
            shown |= {name: one.value for name, one in event.materialization.metadata.items()}
        return shown


def _reason(result: dg.ExecuteInProcessResult) -> str:
    for event in result.all_events:
        if event.is_step_failure:
            failure = event.step_failure_data
            said = failure.user_failure_data
            return str(said.description if said else failure.error.message)
    return "a run failed"
