"""Which build of Arroyo hashed the rows of a job, found from the rows themselves."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pyarrow as pa

from arroyo_dagster.errors import FormatError, InputError
from arroyo_dagster.state.codec.hashing.routing import HashVariant, matching_variants
from arroyo_dagster.state.codec.parquet import decoding, open_pages
from arroyo_dagster.state.codec.schema import file_schema
from arroyo_dagster.state.model.checkpoints import Checkpoint
from arroyo_dagster.state.model.ids import StatePath
from arroyo_dagster.state.model.tables import (
    ExpiringTimeKeyConfig,
    ExpiringTimeKeyFiles,
)
from arroyo_dagster.state.planning.restore.reads import ordered_operators
from arroyo_dagster.state.storage.store import ObjectStore

__all__ = ["HashEvidence", "find_hash_variant"]

_ROWS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class HashEvidence:
    """What the rows of a job say of the build that hashed them.

    Attributes:
        possible: the variants that agree with all rows looked at. One, as a rule; several where
            no row could tell them apart; none where rows disagree with every one.
        rows, files: how much was looked at.
        against: the file whose rows ruled the last variant out; None = one is left.
    """

    possible: tuple[HashVariant, ...]
    rows: int = 0
    files: int = 0
    against: StatePath | None = None

    @property
    def variant(self) -> HashVariant | None:
        """The one variant that is left; None where there are several, or none."""
        return self.possible[0] if len(self.possible) == 1 else None

    @property
    def summary(self) -> str:
        """What was found, in a sentence for people."""
        if self.variant is not None:
            return self.variant.label
        if self.possible:
            return "not known: no row has a key that distinguishes the builds of Arroyo"
        return (
            f"the routing keys in {self.against} match no build of Arroyo, or another one than "
            "in the files before"
        )


def find_hash_variant(store: ObjectStore, checkpoint: Checkpoint) -> HashEvidence:
    """Find which variant of the hash a job's routing keys were made by.

    Reads at most 1,024 rows of a file, one file after the other until one variant is left: as a
    rule a single file. A job restored by another build has its keys in the wrong subtasks.

    Raises:
        FormatError: a file is not Parquet, or not of its table's schema.
        NotFoundError: a file that the checkpoint lists is gone.
    """
    evidence = HashEvidence(possible=tuple(HashVariant))
    for path, config in _hashed_files(checkpoint):
        if len(evidence.possible) <= 1:
            break
        rows = _first_rows(store, path, config)
        if rows is None:
            continue
        keys = [rows.column(index) for index in config.schema.hashed_indices]
        try:
            possible = matching_variants(keys, rows.column(len(rows.schema) - 2), evidence.possible)
        except InputError:
            # A key of a type that is not hashed here tells nothing.
            continue
        evidence = HashEvidence(
            possible=possible,
            rows=evidence.rows + rows.num_rows,
            files=evidence.files + 1,
            against=None if possible else path,
        )
    return evidence


def _hashed_files(checkpoint: Checkpoint) -> Iterator[tuple[StatePath, ExpiringTimeKeyConfig]]:
    for operator in ordered_operators(checkpoint):
        for name, files in sorted(operator.tables.items()):
            config = operator.configs[name].config if name in operator.configs else None
            if not isinstance(files, ExpiringTimeKeyFiles):
                continue
            if not isinstance(config, ExpiringTimeKeyConfig):
                continue  # damaged: `verify` tells it
            if config.schema.hashed_indices:  # without a key every build gives 0
                yield from ((file.path, config) for file in files.files)


def _first_rows(
    store: ObjectStore, path: StatePath, config: ExpiringTimeKeyConfig
) -> pa.RecordBatch | None:
    """The first rows of a file; None where it has none."""
    expected = file_schema(config)
    with store.open_input(path) as file, decoding(path):
        parquet = open_pages(file)
        found = parquet.schema_arrow
        rows = next(parquet.iter_batches(batch_size=_ROWS), None)
    if found.types != expected.types:
        raise FormatError(
            "the columns of a data file do not match its table",
            path=path,
            found=found.to_string(),
            expected=expected.to_string(),
            next_step="keep the object; `verify` lists what else is wrong with the epoch",
        )
    return rows
