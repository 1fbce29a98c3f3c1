"""`arroyo-state`: a subcommand per journey.

Exit codes: 0 done, 1 an error of this package (one message on stderr), 2 a wrong command line,
3 `verify`, `sdf check`, `doctor` or `gc journal --check` looked and found errors.
"""

from arroyo_dagster.cli import (
    compaction,
    doctor,
    forget,
    gc,
    leases,
    looking,
    maintenance,
    rewriting,
    rollback,
    running,
    sdf,
    verifying,
    window,
)
from arroyo_dagster.cli.grammar import main

__all__ = [
    "compaction",
    "doctor",
    "forget",
    "gc",
    "leases",
    "looking",
    "main",
    "maintenance",
    "rewriting",
    "rollback",
    "running",
    "sdf",
    "verifying",
    "window",
]
