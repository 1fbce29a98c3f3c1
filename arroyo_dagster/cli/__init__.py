"""`arroyo-state`: one subcommand per journey.

Exit codes: 0 done; 1 an error of this package (one message on stderr); 2 a wrong command line; 3
`verify`, `health`, `audit`, `sdf check`, `sdf test` or `doctor` found errors;
130 interrupted by Ctrl-C; 141 the reader of the output closed it.
"""

from arroyo_dagster.cli.common import main

__all__ = ["main"]
