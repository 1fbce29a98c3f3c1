"""Queries of every table that a real Arroyo wrote: each way to read gives the rows of a restore."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from arroyo_dagster.state import EpochTable, GlobalKeyedTable, StateCatalog, open_state
from arroyo_dagster.state.codec.bincode.arrow_values import decode_to_arrow
from arroyo_dagster.state.codec.plain import plain_scalar, unique_names
from arroyo_dagster.state.operations.query.expiring_scan import ExpiringScan
from arroyo_dagster.state.operations.query.names import parse_name
from tests.compat.arroyo import ARCHIVES, unpack
from tests.internals import restored_rows

ROWS_TO_LOOK_UP = 3
COMPARED = {
    "=": pc.equal,
    "<": pc.less,
    "<=": pc.less_equal,
    ">": pc.greater,
    ">=": pc.greater_equal,
}


@pytest.fixture(scope="module", params=ARCHIVES)
def state(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> StateCatalog:
    return open_state(unpack(request.param, tmp_path_factory.mktemp(request.param)))


def tables(state: StateCatalog) -> Iterator[EpochTable]:
    for job in state.jobs():
        numbers = job.epochs()
        for number in {numbers[0], numbers[-1]}:
            yield from job.epoch(number).tables()


def counted(rows: pa.Table) -> Counter[str]:
    """Rows as a multiset."""
    columns = [[repr(plain_scalar(value)) for value in column] for column in rows.columns]
    return Counter(map(repr, zip(*columns, strict=True)))


def same_rows(found: pa.Table, expected: pa.Table) -> bool:
    """Whether both hold the same rows, in any order; fast where the order is the same."""
    return found.equals(expected) or counted(found) == counted(expected)


def brute_force(table: EpochTable) -> pa.Table:
    """The rows that a restore holds, by the code that `rows` and `verify` use."""
    scan = table.scan
    if isinstance(scan, ExpiringScan):
        rows = restored_rows(
            scan.store, scan.operator, scan.name, managed=scan.checkpoint.progress is not None
        ).rows
        return rows.rename_columns(unique_names(rows.schema.names))
    stored = GlobalKeyedTable(scan.operator.configs[scan.name], scan.store)
    held = stored.load_with_version(scan.paths)
    kinds = (scan.form.key_type, scan.form.value_type)
    entries = (list(held), [value for _, value in held.values()])
    columns = [
        pa.chunked_array([column], pa.binary())
        if kind is None
        else decode_to_arrow(pa.chunked_array([column], pa.binary()), kind)
        for column, kind in zip(entries, kinds, strict=True)
    ]
    return pa.Table.from_arrays(columns, schema=scan.schema)


def test_every_way_to_read_gives_the_rows_of_a_restore(state: StateCatalog) -> None:
    inspected = 0
    for table in tables(state):
        expected = counted(brute_force(table))
        rows = table.to_arrow()
        assert counted(rows) == expected, table.name
        assert rows.schema.equals(table.schema)
        parts = [part for split in table.splits(3) for part in table.read(split)]
        assert sum(map(counted, parts), Counter()) == expected, table.name
        assert table.to_polars().collect().height == rows.num_rows
        some = table.schema.names[:2]
        assert same_rows(table.to_arrow(some), rows.select(some))
        assert table.to_arrow(limit=2).num_rows == min(2, rows.num_rows)
        at_epoch = replace(table.name, job=f"{table.name.job}@{table.epoch}")
        assert state.table(str(at_epoch)).epoch == table.epoch
        inspected += rows.num_rows
    assert inspected


def test_raw_rows_are_all_stored_rows(state: StateCatalog) -> None:
    for table in tables(state):
        raw = table.raw().to_arrow()
        paths = set(raw.column("_file").to_pylist())
        assert paths <= set(table.scan.paths)
        assert set(raw.column("_operation").to_pylist()) <= {"insert"}
        assert raw.num_rows >= table.to_arrow().num_rows or not table.scan.divisible_by_file


def test_filters_and_look_ups_agree_with_all_rows(state: StateCatalog) -> None:
    looked_up = 0
    for table in tables(state):
        rows = table.to_arrow()
        # Only of the newest epoch: these read each file seven times per column.
        if table.epoch == state.job(table.name.job).epochs()[-1]:
            for position, name in enumerate(table.schema.names):
                looked_up += _filters_agree(table, rows, name, position % 2)
        keys = list(table.key_columns)
        listed = rows.select(keys).to_pylist()
        for row in rows.select(keys).slice(0, ROWS_TO_LOOK_UP).to_pylist() if keys else ():
            if any(isinstance(value, dict | float) for value in row.values()):
                continue
            found = table.lookup(row if isinstance(table.scan, ExpiringScan) else row["key"])
            same = [all(one[k] == row[k] for k in keys) for one in listed]
            assert same_rows(found, rows.filter(pa.array(same))), table.name
            looked_up += 1
    assert looked_up


def _filters_agree(table: EpochTable, rows: pa.Table, name: str, first: int) -> int:
    """Every other relation, from the first one on: the columns take turns."""
    kind = rows.schema.field(name).type
    values: list[pa.Scalar] = list(rows.column(name).drop_null().slice(0, ROWS_TO_LOOK_UP))
    if not values or pa.types.is_nested(kind) or pa.types.is_floating(kind):
        return 0
    for relation, compare in list(COMPARED.items())[first::2]:
        found = table.to_arrow(where=[(name, relation, values[-1])])
        mask = pc.fill_null(compare(rows.column(name), values[-1]), False)
        assert same_rows(found, rows.filter(mask)), (table.name, name, relation)
    within = pc.is_in(rows.column(name), pa.array(values, kind))
    found = table.to_arrow(where=[(name, "in", values)])
    assert same_rows(found, rows.filter(within)), (table.name, name)
    return 1


def test_names_of_tables_survive_quoting(state: StateCatalog) -> None:
    for table in tables(state):
        assert parse_name(str(table.name)) == table.name
