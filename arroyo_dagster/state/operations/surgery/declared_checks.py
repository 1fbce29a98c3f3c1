"""Where the rows that a job has stored contradict the declaration of its tables.

What names and types of columns do not show: the slide of a window, and which aggregates keep their
arguments, and of which type.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

import pyarrow as pa

from arroyo_dagster.errors import InputError
from arroyo_dagster.state.codec.args_row import argument_bytes
from arroyo_dagster.state.model.checkpoints import Checkpoint
from arroyo_dagster.state.model.surgery.declared import DeclaredTable
from arroyo_dagster.state.model.tables import ExpiringTimeKeyConfig, ExpiringTimeKeyFiles, TimeFile
from arroyo_dagster.state.operations.surgery.conversion import accumulator_numbers, stored_columns
from arroyo_dagster.state.storage.store import ObjectStore

_NANOS_PER_MICRO = 1000
_HEAD = tuple[int, bytes]


def contradictions(
    store: ObjectStore,
    checkpoint: Checkpoint,
    table: DeclaredTable,
    arguments: Mapping[int, pa.DataType],
) -> Iterator[InputError]:
    """Yield what is declared of a table, and its stored rows contradict.

    Args:
        arguments: the types of what its aggregates count, by position in the SELECT.

    Raises:
        FormatError, NotFoundError: a file of the table is broken, or missing.
    """
    place = f"tables.{table.operator}.{table.table}"
    config, files = _stored(checkpoint, table)
    if arguments:
        stored = accumulator_numbers(store, config, files)
        yield from _other_aggregates(f"{place}.distinct", arguments.keys(), stored)
        for number, kind in arguments.items():
            yield from _other_arguments(f"{place}.distinct.{number}", kind, stored.get(number, ()))
    if table.every_micros is not None and not _divides(store, config, files, table.every_micros):
        yield InputError(
            f"{place}.every_seconds: the job has bins that do not begin at multiples of "
            f"{table.every_micros / 1e6:g} s",
            next_step="give the slide of the window, the first interval of `hop`",
        )


def _stored(
    checkpoint: Checkpoint, table: DeclaredTable
) -> tuple[ExpiringTimeKeyConfig, tuple[TimeFile, ...]]:
    operator = checkpoint.operator(table.operator)
    assert operator is not None
    config, files = operator.configs[table.table].config, operator.tables.get(table.table)
    assert isinstance(config, ExpiringTimeKeyConfig)
    return config, files.files if isinstance(files, ExpiringTimeKeyFiles) else ()


def _divides(
    store: ObjectStore,
    config: ExpiringTimeKeyConfig,
    files: tuple[TimeFile, ...],
    every_micros: int,
) -> bool:
    for part in stored_columns(store, config, files, (config.schema.timestamp_index,)):
        starts = part.column(0).cast(pa.int64()).unique().to_pylist()
        if any(start % (every_micros * _NANOS_PER_MICRO) for start in starts):
            return False
    return True


def _other_aggregates(
    place: str, declared: Collection[int], stored: Collection[int]
) -> Iterator[InputError]:
    """Yield that others are declared than those that keep their arguments."""
    if stored and set(declared) != set(stored):
        yield InputError(
            f"{place}: the job keeps the arguments of the aggregates at "
            f"{', '.join(map(str, sorted(stored)))}, not at "
            f"{', '.join(map(str, sorted(declared)))}",
            next_step="count the aggregates of the SELECT from 0",
        )


def _other_arguments(
    place: str, kind: pa.DataType, stored: Collection[_HEAD]
) -> Iterator[InputError]:
    """Yield that an aggregate has arguments of another type than the job has stored."""
    try:
        size = argument_bytes(kind)
    except InputError as error:
        yield InputError(f"{place}: {error.message}", next_step=error.next_step)
        return
    wrong = [one for one, _ in stored if (not _is_blocks(one) if size is None else one != size)]
    if wrong:
        expected = "text or bytes" if _is_blocks(wrong[0]) else f"{8 * (wrong[0] - 1)} bits"
        yield InputError(
            f"{place}: the arguments have the type {kind}, and in the job {expected}",
            next_step="cast it to the type of the column in the job's SQL",
        )
        return
    values = [head[1] for _, head in stored if head[:1] == b"\1" and len(head) == 2]
    # The top bit of signed numbers is flipped: only negative ones begin with 0.
    if pa.types.is_signed_integer(kind) and values and max(values) < 0x80:
        yield InputError(
            f"{place}: the job's arguments are unsigned, or all are negative, and Spark has no "
            "unsigned numbers",
            next_step="leave table `b` out: it starts empty",
        )


def _is_blocks(size: int) -> bool:
    """Whether a value of any length may have a row of this size."""
    return size in (1, 10, 19, 28, 37) or (size > 37 and (size - 37) % 33 == 0)
