"""The dataflows of examples/sdf, against plain computations over the same records."""

from __future__ import annotations

import json
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
from arroyo_dagster.state import open_state

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
