"""An evolve that would have to guess is refused, and prints the override that decides it: columns
of another name, aggregates in another order, windows with another slide."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from click.testing import CliRunner, Result

from arroyo_dagster import (
    Layout,
    MemoryStore,
    ParquetBackend,
    cli,
    configure,
    find_job,
    timestamp_table_config,
)
from tests.arroyo_jobs import EVENTS, SECOND, table_rows
from tests.evolved_jobs import COUNT, KEY, MOST, Column, Sql, sql_job
from tests.jobs import listing
from tests.programs import Operator, program_database, sliding
from tests.surgery_jobs import BEGAN, NANOS, WATERMARK, SurgeryJob

LINE = re.compile(r"`((?:rename|fill|accumulators|map): [^`]*)`")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[MemoryStore]:
    yield MemoryStore(f"guesses-{tmp_path.name}")
    configure(None)


def evolve(store: MemoryStore, *more: str) -> Result:
    words = ["evolve", "job_a", "job_b", "--assume", "job_b=stopped", "--url", store.url, *more]
    return CliRunner().invoke(cli.main, words)


def of_view(view: str) -> Sql:
    def column(name: str, kind: pa.DataType) -> Column:
        return name.format(view=view), kind, True

    return Sql(
        key=(f"{view}.k", KEY[1], True),
        window=(COUNT, column("sum({view}.v)[sum]", pa.int64())),
        totals=(COUNT, column("max({view}.v)[value]", pa.int64())),
    )


def decided(store: MemoryStore, file: Path, most: int) -> Result:
    """Evolve with the first override that each refusal prints, until nothing is refused."""
    lines: dict[str, list[str]] = {}
    file.write_text("{}")
    for _ in range(most):
        found = evolve(store, "--overrides", str(file))
        if found.exit_code == 0:
            return found
        name, _, value = LINE.findall(" ".join(found.stderr.split()))[0].partition(": ")
        lines.setdefault(name, []).append(value[1:-1])
        merged = {name: _merged(values) for name, values in lines.items()}
        file.write_text("\n".join(f"{name}: {value}" for name, value in merged.items()))
    return found


def _merged(values: list[str]) -> str:
    whole: dict[str, Any] = {}
    for one in values:
        for operator, value in json.loads(f"{{{one}}}").items():
            whole[operator] = (
                value if isinstance(value, str) else {**whole.get(operator, {}), **value}
            )
    return json.dumps(whole)


def test_a_renamed_view_keeps_its_state_with_the_overrides_that_are_printed(
    store: MemoryStore, tmp_path: Path
) -> None:
    sql_job(Layout.LEGACY, "job_a", of_view("pv"), store=store)
    sql_job(Layout.LEGACY, "job_b", of_view("renamed"), base=7, epochs=2, store=store)
    was = listing(store)
    refused = evolve(store, "--yes")
    assert (refused.exit_code, listing(store)) == (1, was)
    found = decided(store, tmp_path / "changes.yaml", 13)
    assert found.exit_code == 0, found.stderr
    assert "filled" not in found.stdout
    text = (tmp_path / "changes.yaml").read_text()
    assert '"sum(renamed.v)[sum]": "sum(pv.v)[sum]"' in text
    assert '"renamed.k": "pv.k"' in text


def test_a_renamed_column_alone_is_neither_filled_nor_dropped(
    store: MemoryStore, tmp_path: Path
) -> None:
    other = ("sum(renamed.v)[sum]", pa.int64(), True)
    sql_job(
        Layout.LEGACY,
        "job_a",
        Sql(window=(COUNT, ("sum(pv.v)[sum]", pa.int64(), True))),
        store=store,
    )
    sql_job(Layout.LEGACY, "job_b", Sql(window=(COUNT, other)), base=7, store=store)
    suggested = evolve(store)
    assert (suggested.exit_code, "--map tumbling_4=tumbling_4 (in" in suggested.stderr) == (1, True)
    pair = ("--map", "tumbling_4=tumbling_4")
    refused = evolve(store, *pair)
    assert refused.exit_code == 1
    text = " ".join(refused.stderr.split())
    assert '`rename: {"tumbling_4": {"sum(renamed.v)[sum]": "sum(pv.v)[sum]"}}`' in text
    assert '`fill: {"tumbling_4": {"sum(renamed.v)[sum]": null}}`' in text
    file = tmp_path / "changes.yaml"
    file.write_text('fill: {"tumbling_4": {"sum(renamed.v)[sum]": null}}')
    assert "filled: sum(renamed.v)[sum]" in evolve(store, "--overrides", str(file), *pair).stdout


def programs(
    path: Path, store: MemoryStore, job_a: bytes, job_b: bytes, *, operator: str
) -> list[str]:
    """A database in which an operator of each job has such a program."""
    found: dict[str, list[Operator]] = {}
    for name, config in (("job_a", job_a), ("job_b", job_b)):
        epoch = ParquetBackend(store, find_job(store, name)).load()
        order = sorted(epoch.operators, key=lambda one: one.operator.startswith("sink_"))
        kind = "SlidingWindowAggregate" if operator.startswith("sliding") else "Any"
        found[name] = [
            (str(one.operator), kind, config) if one.operator == operator else (one.operator, "Any")
            for one in order
        ]
    return ["--arroyo-db", program_database(path, found)]


def test_distinct_aggregates_are_not_matched_by_their_order(
    store: MemoryStore, tmp_path: Path
) -> None:
    sql = Sql(totals=(COUNT, MOST), distinct=(1, 2))
    sql_job(Layout.LEGACY, "job_a", sql, store=store)
    sql_job(Layout.LEGACY, "job_b", sql, base=7, store=store)
    refused = evolve(store)
    assert (refused.exit_code, "which of its aggregates" in refused.stderr) == (1, True)
    assert decided(store, tmp_path / "changes.yaml", 2).exit_code == 0
    assert '{"updating_aggregate_7": {"1": 1, "2": 2}}' in (tmp_path / "changes.yaml").read_text()
    where = {"operator": "updating_aggregate_7"}
    swapped = programs(tmp_path / "other.sqlite", store, b"a, b", b"b, a", **where)
    assert "which of its aggregates" in evolve(store, *swapped).stderr
    same = programs(tmp_path / "same.sqlite", store, b"a, b", b"a, b", **where)
    shown = evolve(store, *same)
    assert shown.exit_code == 0, shown.stderr
    assert "which columns its aggregates take" not in shown.stdout


@pytest.mark.parametrize(("slide", "code"), [(10, 0), (20, 1)])
def test_a_window_with_another_slide_is_refused(
    store: MemoryStore, tmp_path: Path, slide: int, code: int
) -> None:
    config = timestamp_table_config(
        "t", "Sliding_intermediate", keys=["k"], retention_micros=40 * SECOND, schema=EVENTS
    )
    for name in ("job_a", "job_b"):
        job = SurgeryJob(
            Layout.LEGACY, parallelism=1, store=store, watermark_micros=WATERMARK, job=name
        )
        rows = table_rows(EVENTS, [["k1"], [1], [BEGAN * 1000 + 40 * NANOS]])
        job.write({("sliding_window_4", config): rows})
    same, other = sliding("hop", 40, 10), sliding("hop", 40, slide)
    where = programs(tmp_path / "db.sqlite", store, same, other, operator="sliding_window_4")
    found = evolve(store, *where)
    assert found.exit_code == code, found.output
    assert "slide" not in found.stdout
    if code:
        assert "its windows slide by 20 s, and in the source by 10 s" in found.stderr
