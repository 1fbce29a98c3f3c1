"""What is exported, and where to: settings of exports."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from arroyo_dagster.errors import InputError
from arroyo_dagster.state.model.ids import JobId
from arroyo_dagster.state.model.layout import JobPaths

FORMATS = ("parquet", "delta", "iceberg")
NEWEST, EVERY, CHANGES = "newest", "every", "changes"
EPOCHS = (NEWEST, EVERY, CHANGES)


def _check(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise InputError(f"not a value of the option {name}: {value!r}", expected=", ".join(known))


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetOptions:
    """How exported rows are written.

    Attributes:
        format: `parquet`, `delta` or `iceberg`.
        unsigned, nanos: as in `TypeOptions`; None = the default, of Parquet types as they are.
        epoch_column: the column of Delta and Iceberg tables with the number of the epoch.
        catalog: the properties of pyiceberg's catalog.
        options: of the client of the target's store, as `open_store` takes them.

    Raises:
        InputError: there is no such format.
    """

    format: str = FORMATS[0]
    unsigned: str | None = None
    nanos: str | None = None
    epoch_column: str = "epoch"
    catalog: Mapping[str, str] = field(default_factory=dict, repr=False)
    options: Mapping[str, Any] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        _check("format", self.format, FORMATS)


@dataclass(frozen=True, slots=True, kw_only=True)
class TableExport:
    """A table that is exported again and again.

    Attributes:
        name: of the export: letters, digits and underscores.
        jobs: the jobs whose table is exported: a name as `pipeline/job`, or a pattern, `shop/*`.
        operator, table: the table.
        target: a folder, a URL, or `namespace.table` of Iceberg; `{pipeline}` and `{job}` stand for
            those of the job.
        epochs: `newest` = the newest epoch of each run; `every` = every visible epoch; `changes` =
            what changed from each visible epoch to the next.
        to: how rows are written.

    Raises:
        InputError: another name, another value of `epochs`, or another placeholder in the target.
    """

    name: str
    jobs: str
    operator: str
    table: str
    target: str
    epochs: str = NEWEST
    to: TargetOptions = TargetOptions()

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[A-Za-z0-9_]+", self.name):
            raise InputError(
                f"not the name of an export: {self.name!r}", expected="letters, digits, underscores"
            )
        _check("epochs", self.epochs, EPOCHS)
        self.target_of(JobPaths(JobId("job")))

    def covers(self, paths: JobPaths) -> bool:
        """Return whether the table of a job is exported."""
        return fnmatch.fnmatchcase(str(paths.root), self.jobs)

    def target_of(self, paths: JobPaths) -> str:
        """Return the target for a job.

        Raises:
            InputError: the target has another placeholder.
        """
        try:
            return self.target.format(pipeline=paths.pipeline or "", job=paths.job)
        except (KeyError, IndexError, ValueError) as error:
            raise InputError(
                f"not a target: {self.target!r}",
                export=self.name,
                expected="a target, with no placeholders but {pipeline} and {job}",
            ) from error
