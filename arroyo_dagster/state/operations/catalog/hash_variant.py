"""Determine from a job's rows which build of Arroyo hashed their keys."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from arroyo_dagster.errors import FormatError, InputError
from arroyo_dagster.state.codec.hashing.ahash import HashVariant
from arroyo_dagster.state.codec.parquet import decoding, open_pages
from arroyo_dagster.state.model.checkpoints import Checkpoint
from arroyo_dagster.state.model.ids import StatePath
from arroyo_dagster.state.model.tables import ExpiringTimeKeyConfig, ExpiringTimeKeyFiles
from arroyo_dagster.state.planning.restore.reads import ordered_operators
from arroyo_dagster.state.storage.store import ObjectStore

_ROWS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class HashEvidence:
    """Evidence in the rows of a job about the build that hashed their keys.

    Attributes:
        possible: the variants that agree with all rows read. Normally one; several where no row
            distinguishes them; none where rows contradict every variant.
        rows, files: how many were read.
        against: the file whose rows ruled out the last variant; None = at least one is left.
    """

    possible: tuple[HashVariant, ...]
    rows: int = 0
    files: int = 0
    against: StatePath | None = None

    @property
    def variant(self) -> HashVariant | None:
        """The only possible variant; None if there are several or none."""
        return self.possible[0] if len(self.possible) == 1 else None

    @property
    def summary(self) -> str:
        """The result as one sentence for people."""
        if self.variant is not None:
            return self.variant.label
        if self.possible:
            return "not known: no row has a key that distinguishes the builds of Arroyo"
        return (
            f"the routing keys in {self.against} match no build of Arroyo, or another one than "
            "in the files before"
        )


def find_hash_variant(store: ObjectStore, checkpoint: Checkpoint) -> HashEvidence:
    """Determine which variant of the hash produced a job's routing keys.

    Reads at most 1,024 rows per file, file by file until one variant is left; normally one file
    suffices. If another build restores the job, its keys are in the wrong subtasks.

    Raises:
        FormatError: a file is not Parquet, or does not have its table's schema.
        NotFoundError: a file that the checkpoint lists is missing.
    """
    evidence = HashEvidence(possible=tuple(HashVariant))
    for path, config in _hashed_files(checkpoint):
        if len(evidence.possible) <= 1:
            break
        # The first rows of a file; None if it has none.
        from arroyo_dagster.state.codec.schema import file_schema

        expected = file_schema(config)
        with store.open_input(path) as file, decoding(path):
            parquet = open_pages(file)
            schema = parquet.schema_arrow
            rows = next(parquet.iter_batches(batch_size=_ROWS), None)
        if schema.types != expected.types:
            raise FormatError(
                "the columns of a data file do not match its table",
                path=path,
                found=schema.to_string(),
                expected=expected.to_string(),
                next_step="keep the object; `verify` lists what else is wrong with the epoch",
            )
        if rows is None:
            continue
        from arroyo_dagster.state.codec.hashing.routing import matching_variants

        keys = [rows.column(index) for index in config.schema.hashed_indices]
        try:
            possible = matching_variants(keys, rows.column(len(rows.schema) - 2), evidence.possible)
        except InputError:
            # A key of a type that is not hashed here is no evidence.
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
                continue  # damaged: `verify` reports it
            if config.schema.hashed_indices:  # without a key, every build returns 0
                yield from ((file.path, config) for file in files.files)
