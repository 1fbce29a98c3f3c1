"""`arroyo-state`: one subcommand per journey.

Exit codes: 0 done; 1 an error of this package (one message on stderr); 2 a wrong command line; 3
`verify`, `sdf check`, `sdf test`, `doctor` or `gc journal --check` found errors.
"""

from arroyo_dagster.cli import (
    compaction,
    doctor,
    forget,
    gc,
    inspect,
    leases,
    maintenance,
    rewrite,
    rollback,
    run,
    sdf,
    verify,
    window,
)
from arroyo_dagster.cli.common import main

__all__ = [
    "compaction",
    "doctor",
    "forget",
    "gc",
    "inspect",
    "leases",
    "main",
    "maintenance",
    "rewrite",
    "rollback",
    "run",
    "sdf",
    "verify",
    "window",
]
