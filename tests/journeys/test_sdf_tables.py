"""The tables of SDF services are tables like any other: read, verified, merged, collected, lost
never. The dataflows of examples/sdf equal plain computations over the same records."""

from __future__ import annotations

import contextlib
import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from arroyo_dagster import cli
from arroyo_dagster.errors import NotFoundError
from arroyo_dagster.sdf_testing import DataflowTrial
from arroyo_dagster.state import (
    CompactionPolicy,
    CompactionSettings,
    MemoryStore,
    ObjectStore,
    ParquetBackend,
    open_state,
    read_rows,
    run_compaction,
    run_gc,
    verify_job,
)
from tests.dataflows import Flow, definition, row_of
from tests.faulty_stores import Crash, FaultInjecting
from tests.gc_jobs import expiry
from tests.journeys.test_sdf_acceptance import event, windowed

FULL = CompactionSettings(policy=CompactionPolicy.FULL)
BOTH = """
  build:
    sources: [{type: topic, id: words}]
    states:
      cells:
        type: keyed-state
        properties: {key: {type: string}, value: {type: u32}}
      rows:
        type: keyed-state
        properties:
          key: {type: string}
          value: {type: arrow-row, properties: {n: {type: u32}, last: {type: string}}}
    partition:
      assign-key:
        run: |
          def first_letter(record):
              return record[0]
      update-state:
        run: |
          def add(record):
              cells().increment(1)
              row = rows()
              if record.endswith("!"):
                  row.delete()
                  return
              row.n += 1
              row.last = record
              row.update()
"""


def letters(count: int, seed: int) -> list[str]:
    chance = random.Random(seed)
    return [
        chance.choice("abcdefgh") + str(at) + ("!" if chance.random() < 0.15 else "")
        for at in range(count)
    ]


def expected(words: list[str]) -> tuple[dict[str, int], dict[str, dict[str, Any]]]:
    rows: dict[str, dict[str, Any]] = {}
    for word in words:
        if word.endswith("!"):
            rows.pop(word[0], None)
        else:
            row = rows.setdefault(word[0], {"n": 0, "last": ""})
            row["n"], row["last"] = row["n"] + 1, word
    return dict(Counter(word[0] for word in words)), rows


def flow_of(words: list[str], **options: Any) -> Flow:
    flow = Flow(definition(BOTH, converter="raw"), **options)
    flow.topics["words"].send(*words)
    return flow


@pytest.mark.parametrize("parallelism", [1, 2])
def test_maintenance_changes_nothing_that_readers_or_builders_see(parallelism: int) -> None:
    words = letters(80, 1)
    flow = flow_of(words, parallelism=parallelism)
    flow.topics["words"].per_epoch = 10
    paths = flow.pipelines[0].paths
    for turn in range(8):
        flow.step()
        if turn % 3 == 1:
            flow.restart()
        if turn % 4 == 2:
            run_compaction(flow.store, paths, FULL)
            flow.restart()
        if turn % 5 == 4:
            run_gc(flow.store, paths, expiry(2))
        cells, rows = expected(words[: 10 * (turn + 1)])
        assert (flow.cells("build.cells"), flow.rows("build.rows")) == (cells, rows)
        verdict = verify_job(flow.store, paths)
        assert verdict.passed, verdict
    found = read_rows(flow.store, paths, "states", "rows")
    assert {row["_key"]: row["n"] for row in found.rows} == {
        key: row["n"] for key, row in expected(words)[1].items()
    }


def test_a_builder_takes_over_what_was_merged_while_it_runs() -> None:
    words = letters(80, 2)
    flow = flow_of(words)
    flow.topics["words"].per_epoch = 10
    for _ in range(5):
        flow.step()
    run_compaction(flow.store, flow.pipelines[0].paths, FULL)
    flow.run()
    assert (flow.cells("build.cells"), flow.rows("build.rows")) == expected(words)
    assert verify_job(flow.store, flow.pipelines[0].paths).passed


def test_windowed_tables_drop_what_is_closed_and_stay_restorable() -> None:
    flow = windowed(
        value=row_of(n="u32"),
        body="row = counts(); row.n += 1; row.update()",
        flush="return [[row['_key'], row['n']] for row in counts()]",
        parallelism=2,
    )
    paths = flow.pipelines[0].paths
    for second in range(0, 60, 5):
        flow.send("events", [event(second, "a"), event(second + 1, "b")])
        assert verify_job(flow.store, paths).passed
        if second % 20 == 0:
            run_compaction(flow.store, paths, FULL)
            flow.restart()
    values = flow.sinks["closed"].values
    assert values == [[["a", 2], ["b", 2]]] * 5
    newest = ParquetBackend(flow.store, paths).load()
    operator = newest.operator("states")
    assert operator is not None
    assert len(operator.tables["counts"].files) <= 6  # of twelve epochs: closed windows expire
    live = flow.views().view("build.counts", live=True)
    assert live.windows() == [(50_000, 60_000)]


@pytest.mark.parametrize("mode", ["before", "after"])
def test_a_crash_at_any_change_of_the_store_costs_nothing(mode: Any) -> None:
    """The k-th change fails, or is done and then fails; a new run goes on exactly once."""
    words = letters(24, 3)

    def flow_on(store: ObjectStore) -> Flow:
        flow = flow_of(words, store=store)
        flow.topics["words"].per_epoch = 8
        return flow

    counted = FaultInjecting(MemoryStore())
    flow_on(counted).run()
    for at in range(1, counted.changes + 1, 4 if mode == "after" else 5):
        inner = MemoryStore()
        faulty = FaultInjecting(inner, fail_at=at, mode=mode, crash=True)
        with contextlib.suppress(Crash):
            flow_on(faulty).run()
        assert faulty.crashed
        again = flow_on(inner).run()
        assert (again.cells("build.cells"), again.rows("build.rows")) == expected(words), at


PROJECT = Path(__file__).parents[2]
EXAMPLES = PROJECT / "examples" / "sdf"
FLIGHTS = PROJECT / "examples" / "flights" / "data" / "flights-2013.parquet"
ROWS = 6000


def run(*args: object) -> str:
    result = CliRunner().invoke(cli.main, ["sdf", *map(str, args)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a23_known_words_have_their_count_and_unknown_ones_zero(tmp_path: Path) -> None:
    flow, state = EXAMPLES / "words" / "dataflow.yaml", tmp_path / "state"
    sentences, asked = tmp_path / "sentences.txt", tmp_path / "asked.txt"
    answers = tmp_path / "answers.jsonl"
    sentences.write_text("One fish two fish\nRed fish\n")
    asked.write_text("")
    flags = [
        *("--source", f"sentences=jsonl:{sentences}", "--source", f"asked=jsonl:{asked}"),
        *("--sink", f"answers=jsonl:{answers}", "--url", state),
    ]
    run("run", flow, *flags)
    assert not answers.exists()
    asked.write_text("fish\nblue\nred\n")
    run("run", flow, *flags)
    assert lines(answers) == [
        {"word": "fish", "count": 3, "longest-sentence": 4, "share": 0.5},
        {"word": "blue", "count": 0, "longest-sentence": 0, "share": 0.0},
        {"word": "red", "count": 1, "longest-sentence": 2, "share": 0.1667},
    ]
    # States have the names of every query: dataflow, service, state.
    hits = open_state(str(state)).table('words."count-words".hits').to_arrow()
    hits = hits.select(["_key", "value"])
    assert dict(zip(*hits.to_pydict().values(), strict=True)) == {
        "one": 1,
        "fish": 3,
        "two": 1,
        "red": 1,
    }
    with pytest.raises(NotFoundError):
        open_state(str(state)).table('words."count-words".hit')


@pytest.fixture(scope="module")
def flights(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, pl.DataFrame]:
    """The flights example over the first rows, what it put out, and these rows."""
    folder = tmp_path_factory.mktemp("flights")
    rows = pq.ParquetFile(FLIGHTS).read_row_group(0).slice(0, ROWS)
    pq.write_table(rows, folder / "flights.parquet")
    (folder / "asked.txt").write_text("UA\nZZ\nHA\n")
    flow = EXAMPLES / "flights" / "dataflow.yaml"
    flags = [
        *("--bindings", EXAMPLES / "flights" / "bindings.yaml", "--url", folder / "state"),
        *("--source", f"flights=parquet:{folder}/flights.parquet?rows_per_epoch=2500"),
        *("--sink", f"busiest=jsonl:{folder}/busiest.jsonl"),
        *("--sink", f"alarms=jsonl:{folder}/alarms.jsonl"),
    ]
    (folder / "nobody.txt").write_text("")
    nobody = ("--source", f"asked=jsonl:{folder}/nobody.txt")
    run("run", flow, *flags, *nobody, "--sink", f"reports=jsonl:{folder}/none.jsonl")
    asked = ("--source", f"asked=jsonl:{folder}/asked.txt")
    run("run", flow, *flags, *asked, "--sink", f"reports=jsonl:{folder}/r/", "--flush-open")
    found = pl.from_arrow(rows)
    assert isinstance(found, pl.DataFrame)
    return folder, found


def test_the_busiest_destinations_of_every_hour(flights: tuple[Path, pl.DataFrame]) -> None:
    folder, rows = flights
    hours: dict[int, Counter[str]] = {}
    for scheduled, dest in rows.select("scheduled", "dest").iter_rows():
        hour = int(scheduled.timestamp()) // 3600 * 3_600_000
        hours.setdefault(hour, Counter())[dest] += 1
    expected = [
        {
            "hour": hour,
            "busiest": [
                f"{dest} {count}"
                for dest, count in sorted(found.items(), key=lambda one: (-one[1], one[0]))[:3]
            ],
        }
        for hour, found in sorted(hours.items())
    ]
    assert lines(folder / "busiest.jsonl") == expected


def test_a_report_joins_two_states(flights: tuple[Path, pl.DataFrame]) -> None:
    folder, rows = flights
    found = [one for file in (folder / "r").glob("*.jsonl") for one in lines(file)]
    united = rows.filter(pl.col("carrier") == "UA")
    late = united.filter(pl.col("dep_delay") > 15).height
    assert found[0] == {
        "carrier": "United Air Lines Inc.",
        "flights": united.height,
        "late": late,
        "share-late": round(late / united.height, 4),
    }
    assert [one["carrier"] for one in found] == ["United Air Lines Inc.", "Hawaiian Airlines Inc."]
    query = (
        "select n.name as name, o.flights as flights from on_time o "
        "join carrier_names n on o._key = n._key order by flights desc limit 1"
    )
    flow = EXAMPLES / "flights" / "dataflow.yaml"
    shown = json.loads(run("sql", flow, query, "--url", folder / "state", "--json"))
    counts = rows.group_by("carrier").len().sort("len", descending=True)
    assert shown["rows"][0][1] == counts["len"][0]


def test_an_alarm_is_far_from_all_delays_before(flights: tuple[Path, pl.DataFrame]) -> None:
    folder, rows = flights
    seen: dict[str, list[int]] = {}
    expected = []
    for row in rows.filter(pl.col("dep_delay").is_not_null()).iter_rows(named=True):
        before = seen.setdefault(row["carrier"], [])
        if len(before) >= 100:
            mean = sum(before) / len(before)
            spread = (sum((one - mean) ** 2 for one in before) / len(before)) ** 0.5
            if row["dep_delay"] >= mean + 12 * spread:
                expected.append((row["carrier"], row["flight"], row["dep_delay"], round(mean, 1)))
        before.append(row["dep_delay"])
    found = lines(folder / "alarms.jsonl")
    assert expected
    assert [
        (one["carrier"], one["flight"], one["delay"], one["usual"]) for one in found
    ] == expected


def test_functions_and_the_state_of_a_package_serve_a_dataflow() -> None:
    flow = DataflowTrial(EXAMPLES / "packages" / "dataflow.yaml")
    flow.send("sentences", "to be or not", "to be").run()
    flow.send("asked", "be", "nothing").run()
    assert flow.received("counts") == [2, 0]
    assert flow.state("count-words.word-count")["to"] == {"count": 2}
    assert flow.failed == {}


@pytest.mark.parametrize("name", ["frames", "queries"])
def test_words_are_counted_in_whole_batches(name: str) -> None:
    flow = DataflowTrial(EXAMPLES / "words" / f"{name}.yaml")
    words = [{"text": text, "sentence-length": 3} for text in ("to", "be", "to")]
    flow.send("words", *words).run()
    assert flow.state("count-words.hits") == {"be": 1, "to": 2}
    assert flow.failed == {}
