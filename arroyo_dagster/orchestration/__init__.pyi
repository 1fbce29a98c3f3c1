from .catalog.sensor import (
    SensorOptions as SensorOptions,
)
from .catalog.sensor import (
    build_checkpoint_sensor as build_checkpoint_sensor,
)
from .compaction.assets import CompactionConfig as CompactionConfig
from .compaction.maintenance_window import (
    MaintenanceWindow as MaintenanceWindow,
)
from .compaction.maintenance_window import (
    WindowConfig as WindowConfig,
)
from .component import ArroyoStateComponent as ArroyoStateComponent
from .definitions import (
    ScheduleOptions as ScheduleOptions,
)
from .definitions import (
    build_arroyo_definitions as build_arroyo_definitions,
)
from .directory import ArroyoDirectory as ArroyoDirectory
from .failures import as_failure as as_failure
from .gc.assets import (
    DeadJobsConfig as DeadJobsConfig,
)
from .gc.assets import (
    GcConfig as GcConfig,
)
from .gc.assets import (
    OrphansConfig as OrphansConfig,
)
from .maintenance import MaintenanceOptions as MaintenanceOptions
from .pipes import PipesRunner as PipesRunner
from .pipes import run_pipes_command as run_pipes_command
from .resources import (
    ArroyoStateStore as ArroyoStateStore,
)
from .resources import (
    SparkSessionResource as SparkSessionResource,
)
from .runners import (
    InProcessRunner as InProcessRunner,
)
from .runners import (
    MaintenanceRunner as MaintenanceRunner,
)
from .runners import (
    SparkRunner as SparkRunner,
)
from .schedules import DueOptions as DueOptions
from .schedules import build_due_schedule as build_due_schedule
from .surgery.bootstrapped_state import BootstrapConfig as BootstrapConfig
from .surgery.bootstrapped_state import build_bootstrapped_state as build_bootstrapped_state
from .surgery.forked_state import ForkConfig as ForkConfig
from .surgery.forked_state import StateFork as StateFork
from .surgery.forked_state import (
    build_forked_state as build_forked_state,
)
from .translator import (
    ArroyoTableProps as ArroyoTableProps,
)
from .translator import (
    DagsterArroyoTranslator as DagsterArroyoTranslator,
)
