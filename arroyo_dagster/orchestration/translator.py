"""The name and description of each asset: one class with one method, for users to override."""

import functools
import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import dagster as dg

from arroyo_dagster.errors import InputError
from arroyo_dagster.state.model.ids import checked_name

CHECKPOINT = "checkpoint"
EPOCH_CATALOG = "epoch_catalog"
OPERATOR_METADATA = "operator_metadata"
FLEET = "fleet"
COMPACTED_STATE = "compacted_state"
RETAINED_EPOCHS = "retained_epochs"
ORPHANS = "orphans"
DEAD_JOBS = "dead_jobs"
GC_JOURNAL = "gc_journal"

STATE_GROUP = "arroyo_state"
MAINTENANCE_GROUP = "arroyo_maintenance"
_SENSOR_ALIVE = timedelta(minutes=15)


@dataclass(frozen=True)
class ArroyoTableProps:
    """What is known about an asset when it is named.

    Attributes:
        table: `checkpoint`, `epoch_catalog`, `operator_metadata`, `fleet`, `compacted_state`,
            `retained_epochs`, `orphans`, `dead_jobs`, each of these three with `_plan` too, or
            `gc_journal`.
        deployment: the name of the deployment, if one instance has several.
    """

    table: str
    deployment: str | None = None


@dataclass(frozen=True)
class _AssetText:
    description: str
    group: str = STATE_GROUP
    kinds: tuple[str, ...] = ("arroyo",)


_TABLES = {
    CHECKPOINT: _AssetText(
        "The newest ready epoch of each job, as the job wrote it. The sensor reports it; Dagster "
        "produces nothing here."
    ),
    EPOCH_CATALOG: _AssetText(
        "Every epoch of a job: times, files, bytes, rows, watermark. A row stays when the epoch "
        "expires.",
        kinds=("arroyo", "parquet"),
    ),
    OPERATOR_METADATA: _AssetText(
        "Every data file that a table of an operator lists, at every present epoch.",
        kinds=("arroyo", "parquet"),
    ),
    FLEET: _AssetText("A summary of all jobs, over time."),
    COMPACTED_STATE: _AssetText(
        "A job's state in fewer, larger files. A restore loads the same rows.",
        MAINTENANCE_GROUP,
        ("arroyo", "spark", "parquet"),
    ),
    f"{RETAINED_EPOCHS}_plan": _AssetText(
        "What an expiry of old epochs would delete, and the proof that nothing that stays needs "
        "it.",
        MAINTENANCE_GROUP,
    ),
    RETAINED_EPOCHS: _AssetText(
        "The kept epochs of a job. Older epochs are deleted with the files that only they list.",
        MAINTENANCE_GROUP,
        ("arroyo", "spark"),
    ),
    f"{ORPHANS}_plan": _AssetText(
        "Unreferenced objects of a job, and why each other object stays.", MAINTENANCE_GROUP
    ),
    ORPHANS: _AssetText(
        "Unreferenced objects of a job, deleted once they are old enough.",
        MAINTENANCE_GROUP,
        ("arroyo", "spark"),
    ),
    f"{DEAD_JOBS}_plan": _AssetText(
        "What would be deleted with a job whose pipeline is gone, and the source that confirms it.",
        MAINTENANCE_GROUP,
    ),
    DEAD_JOBS: _AssetText(
        "Jobs that will never run again, deleted completely.",
        MAINTENANCE_GROUP,
        ("arroyo", "spark"),
    ),
    GC_JOURNAL: _AssetText(
        "What was deleted or moved to quarantine, when, by whom and under which plan.",
        MAINTENANCE_GROUP,
    ),
}


class DagsterArroyoTranslator:
    """Names and describes the assets; override `get_asset_spec` to change any of it.

    Dependencies and partitions are added to what it returns.
    """

    def get_asset_spec(self, props: ArroyoTableProps) -> dg.AssetSpec:
        """Return key, group, kinds, description, tags, owners and metadata of an asset."""
        shown = _TABLES.get(props.table)
        if shown is None:
            raise InputError("there is no such asset", table=props.table, tables=list(_TABLES))
        deployment = [props.deployment] if props.deployment else []
        # How long ago any job was heard of tells whether the sensor is alive, nothing more.
        policy = dg.FreshnessPolicy.time_window(fail_window=_SENSOR_ALIVE)
        return dg.AssetSpec(
            ["arroyo", *deployment, props.table],
            group_name=shown.group,
            kinds=set(shown.kinds),
            description=shown.description,
            metadata={"arroyo/table": props.table},
            freshness_policy=policy if props.table == CHECKPOINT else None,
        )


def deployment_identifier(deployment: str) -> str:
    """Return a deployment's name as it stands in names of Dagster: `-` and `.` become `_`.

    Raises:
        InputError: it is not a name for a deployment.
    """
    return checked_name(deployment, "deployment").replace("-", "_").replace(".", "_")


@dataclass(frozen=True)
class Naming:
    """The names of one deployment: of its assets, jobs, ops, resources, partitions...

    Attributes:
        jobs: one partition per job; its keys are the roots of jobs.
    """

    translator: DagsterArroyoTranslator
    jobs: dg.DynamicPartitionsDefinition
    deployment: str | None = None

    def spec(
        self, table: str, *, deps: Iterable[str] = (), partitioned: bool = True
    ) -> dg.AssetSpec:
        """Return the spec of an asset that depends on the tables `deps`."""
        spec = self.translator.get_asset_spec(ArroyoTableProps(table, self.deployment))
        return spec.replace_attributes(
            deps=[*spec.deps, *(self.key(one) for one in deps)],
            partitions_def=self.jobs if partitioned else None,
        )

    def key(self, table: str) -> dg.AssetKey:
        """Return the key of an asset."""
        return self.translator.get_asset_spec(ArroyoTableProps(table, self.deployment)).key

    def name(self, base: str) -> str:
        """Return the name of a job, op, schedule, sensor, pool or resource of this deployment.

        Args:
            base: the name without a deployment, for example `arroyo_refresh`; of the deployment
                `blue` it is `arroyo_blue_refresh`.
        """
        if self.deployment is None:
            return base
        first, _, rest = base.partition("_")
        return f"{first}_{deployment_identifier(self.deployment)}_{rest}"

    def bind(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function whose parameters `arroyo_*` are this deployment's resources.

        Dagster takes a parameter's name for the key of a resource.
        """
        if self.deployment is None:
            return function
        signature = inspect.signature(function)
        renamed = {
            name: self.name(name) for name in signature.parameters if name.startswith("arroyo_")
        }
        names = {key: name for name, key in renamed.items()}

        def given(arguments: dict[str, Any]) -> dict[str, Any]:
            return {names.get(key, key): value for key, value in arguments.items()}

        if inspect.isgeneratorfunction(function):  # Dagster asks the function, not its result

            @functools.wraps(function)
            def bound(*positional: Any, **arguments: Any) -> Any:
                yield from function(*positional, **given(arguments))
        else:

            @functools.wraps(function)
            def bound(*positional: Any, **arguments: Any) -> Any:
                return function(*positional, **given(arguments))

        parameters = [
            one.replace(name=renamed.get(one.name, one.name))
            for one in signature.parameters.values()
        ]
        found: Any = bound
        found.__signature__ = signature.replace(parameters=parameters)
        found.__annotations__ = {
            renamed.get(name, name): hint for name, hint in function.__annotations__.items()
        }
        return bound
