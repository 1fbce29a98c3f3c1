from .compaction.assets import CompactionConfig as CompactionConfig
from .compaction.maintenance_window import (
    MaintenanceWindow as MaintenanceWindow,
)
from .component import ArroyoStateComponent as ArroyoStateComponent
from .definitions import (
    ArroyoOptions as ArroyoOptions,
)
from .definitions import Lineage as Lineage
from .definitions import (
    MaintenanceOptions as MaintenanceOptions,
)
from .definitions import (
    ScheduleOptions as ScheduleOptions,
)
from .definitions import (
    build_arroyo_definitions as build_arroyo_definitions,
)
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
from .pipelines.model import PipelineList as PipelineList
from .pipes import PipesRunner as PipesRunner
from .pipes import run_pipes_command as run_pipes_command
from .resources import ArroyoDirectory as ArroyoDirectory
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
from .sensor import (
    SensorOptions as SensorOptions,
)
from .surgery.bootstrapped_state import BootstrapConfig as BootstrapConfig
from .surgery.forked_state import ForkConfig as ForkConfig
from .surgery.forked_state import StateFork as StateFork
from .translator import (
    ArroyoAssetProps as ArroyoAssetProps,
)
from .translator import (
    DagsterArroyoTranslator as DagsterArroyoTranslator,
)
from .verify.verdict import VerifyOptions as VerifyOptions
