"""A changed pipeline or source never begins empty, and skips no rows, without a word."""

from __future__ import annotations

import json
import textwrap
import uuid
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner, Result

import arroyo_dagster as ad
from arroyo_dagster import cli
from arroyo_dagster.errors import InputError
from arroyo_dagster.state import MemoryStore
from tests.jobs import CountWords, listing, state_of

_FILE = """
import datetime as dt
import pyarrow as pa
import arroyo_dagster as ad


class Count(ad.Operator):
    tables_of = ("n",)

    def tables(self):
        return [ad.global_table_config(name, "rows", key=str, value=int) for name in self.tables_of]

    def on_start(self, ctx):
        opened = [ctx.table_manager.get_global_keyed_state(n, str, int) for n in self.tables_of]
        self.counts = opened[0]

    def process_batch(self, batch, ctx, collector):
        self.counts.merge(batch["k"], batch["n"], "sum")


class Total(Count):
    tables_of = ("total",)


start = dt.datetime(2026, 1, 1)
orders = pa.table({{
    "k": ["ada", "bob"] * 5,
    "n": [1] * 10,
    "at": [start + dt.timedelta(minutes=minute) for minute in range(10)],
}})
pipeline = ad.Pipeline("shop", layout=ad.Layout.{layout})
rows = pipeline.source({source}, timestamp="at")
rows.key_by("k").apply({operator})
rows.sink({sink})
"""


class Shop:
    """A pipeline in a file, run two rows an epoch from the command line."""

    def __init__(self, folder: Path, layout: str) -> None:
        self.folder = folder
        self.layout = layout
        self.job = "shop" if layout == "LEGACY" else "shop/main"

    def run(
        self,
        *options: str,
        source: str = '"orders"',
        operator: str = '"count", Count()',
        sink: str = '"out"',
    ) -> Result:
        def node(names: str, middle: str) -> str:
            name, _, rest = names.partition(", ")
            return ", ".join(filter(None, [name, middle, rest]))

        text = _FILE.format(
            layout=self.layout,
            source=node(source, "ad.TableSource(orders, rows_per_epoch=2)"),
            operator=operator,
            sink=node(sink, f'ad.ParquetSink("file://{self.folder}/out")'),
        )
        file = self.folder / f"shop_{uuid.uuid4().hex}.py"  # a module is loaded once
        file.write_text(textwrap.dedent(text))
        return self.call("run", f"{file}:pipeline", "--epochs", "1", *options)

    def call(self, *arguments: str) -> Result:
        return CliRunner().invoke(cli.main, [*arguments, "--url", f"file://{self.folder}/state"])

    def counts(self, operator: str, table: str = "n") -> dict[str, int]:
        done = self.call("sql", f'select key, value from "{self.job}".{operator}.{table}', "--json")
        return {row["key"]: row["value"] for row in json.loads(done.stdout)}

    def operators(self) -> set[str]:
        done = self.call("sql", f'select distinct operator from "{self.job}".tables', "--json")
        return {row["operator"] for row in json.loads(done.stdout)}


@pytest.fixture(params=["PROTOCOL", "LEGACY"])
def shop(request: pytest.FixtureRequest, tmp_path: Path) -> Shop:
    return Shop(tmp_path, request.param)


def lines(done: Result) -> str:
    assert "Traceback" not in done.output
    return done.output


def ran(done: Result) -> None:
    assert done.exit_code == 0, lines(done)


RENAMED: list[tuple[str, str, dict[str, Any]]] = [
    ("operator", "count", {"operator": '"sums", Count()'}),
    ("source", "orders", {"source": '"sales"'}),
]


@pytest.mark.parametrize(("kind", "old", "changed"), RENAMED, ids=[one[0] for one in RENAMED])
def test_a_renamed_part_of_a_pipeline_is_refused_with_both_names(
    shop: Shop, kind: str, old: str, changed: dict[str, str]
) -> None:
    ran(shop.run())
    refused = shop.run(**changed)
    new = changed[kind].split('"')[1]
    assert refused.exit_code != 0
    assert f"`{old}`" in lines(refused)
    assert f"`{new}`" in lines(refused)
    assert f'renamed_from="{old}"' in lines(refused)
    assert f"--allow-dropped {old}" in lines(refused)
    taken = {kind: changed[kind] + f', renamed_from="{old}"'}
    ran(shop.run(**taken))
    ran(shop.run(**taken))  # the keyword may stay
    assert shop.counts("sums" if kind == "operator" else "count") == {"ada": 3, "bob": 3}
    assert old not in shop.operators()
    ran(shop.call("verify", shop.job))


def test_state_that_is_dropped_on_purpose_stays_in_older_epochs(shop: Shop) -> None:
    ran(shop.run())
    ran(shop.run("--allow-dropped", "count", operator='"sums", Count()'))
    assert shop.counts("sums") == {"ada": 1, "bob": 1}
    assert "count" not in shop.operators()
    ran(shop.run(operator='"sums", Count()'))
    ran(shop.call("rows", f"{shop.job}@1", "count", "n", "--json"))
    ran(shop.call("verify", shop.job))


def test_a_table_that_its_operator_no_longer_registers_is_refused(shop: Shop) -> None:
    ran(shop.run())
    refused = shop.run(operator='"count", Total()')
    assert refused.exit_code != 0
    assert "`count/n`" in lines(refused)
    assert "`count/total`" in lines(refused)
    ran(shop.run("--allow-dropped", "count/n", operator='"count", Total()'))
    assert shop.counts("count", "total") == {"ada": 1, "bob": 1}
    ran(shop.run(operator='"count", Total()'))


def test_a_sink_that_is_renamed_before_its_commit_commits_once(shop: Shop) -> None:
    ran(shop.run())
    ran(shop.run(sink='"to_folder", renamed_from="out"'))
    assert len([*(shop.folder / "out").glob("*.parquet")]) == 2


def test_an_ambiguous_renaming_is_refused(shop: Shop) -> None:
    ran(shop.run())
    taken = '"count", Count(), renamed_from="count"'
    assert "renamed_from" in lines(shop.run(operator=taken))
    ran(shop.run("--allow-dropped", "count", operator='"sums", Count()'))
    # What was dropped is no longer carried, so there is nothing to take over.
    ran(shop.run(operator='"sums", Count(), renamed_from="count"'))
    assert shop.counts("sums") == {"ada": 2, "bob": 2}


# ---- sources whose content changes ---------------------------------------------------------------


def rows_of(keys: str) -> pa.Table:
    times = pa.array(range(len(keys)), pa.timestamp("us"))
    return pa.table({"word": list(keys), "n": list(range(len(keys))), "at": times})


class Replayed:
    """A job that counts the words of a source, which is made anew for each run."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.kind = kind
        self.path = str(folder / "rows.parquet")
        self.store = MemoryStore()

    def source(self, rows: pa.Table) -> ad.Source:
        if self.kind == "table":
            return ad.TableSource(rows, rows_per_epoch=3)
        pq.write_table(rows, self.path)
        return ad.ParquetReplay(self.path, rows_per_epoch=3)

    def run(self, rows: pa.Table, epochs: int | None = None) -> dict[str, int]:
        return self.run_source(self.source(rows), epochs)

    def run_source(self, source: ad.Source, epochs: int | None = None) -> dict[str, int]:
        pipeline = ad.Pipeline("replayed")
        words = pipeline.source("rows", source, timestamp="at")
        words.key_by("word").apply("count", CountWords())
        ad.run_pipeline(pipeline, self.store, max_epochs=epochs)
        return state_of(self.store, pipeline)["count"]["counts"]


@pytest.fixture(params=["table", "parquet"])
def replayed(request: pytest.FixtureRequest, tmp_path: Path) -> Replayed:
    return Replayed(request.param, tmp_path)


@pytest.mark.parametrize("epochs", [1, None], ids=["partly read", "read to its end"])
@pytest.mark.parametrize("keys", ["xyzxyz", "xyzxyzxyz", "ab", "abcab", ""])
def test_a_source_of_other_or_fewer_rows_is_refused(
    replayed: Replayed, keys: str, epochs: int | None
) -> None:
    replayed.run(rows_of("abcabc"), epochs)
    before = listing(replayed.store)
    with pytest.raises(InputError) as error:
        replayed.run(rows_of(keys))
    assert error.value.next_step
    assert error.value.facts["operator"] == "rows"
    assert listing(replayed.store) == before
    assert replayed.run(rows_of("abcabc")) == {"a": 2, "b": 2, "c": 2}


def test_a_source_that_grows_goes_on_also_with_other_columns(replayed: Replayed) -> None:
    replayed.run(rows_of("abcabc"), 1)
    rows = rows_of("abcabcd").drop_columns(["n"])
    assert replayed.run(rows) == {"a": 2, "b": 2, "c": 2, "d": 1}
    wide = rows_of("abcabcde").append_column("more", [[None] * 8])
    assert replayed.run(wide) == {"a": 2, "b": 2, "c": 2, "d": 1, "e": 1}


def test_a_position_without_a_digest_goes_on(replayed: Replayed) -> None:
    replayed.run_source(Earlier(rows_of("abcabc"), rows_per_epoch=3), 1)
    assert replayed.run(rows_of("abcabc")) == {"a": 2, "b": 2, "c": 2}
    with pytest.raises(InputError):
        replayed.run(rows_of("xyzxyzx"))


class Earlier(ad.TableSource):
    """As releases before wrote positions."""

    def latest_offset(self, start: dict[str, Any]) -> dict[str, Any]:
        return {"row": super().latest_offset(start)["row"]}
