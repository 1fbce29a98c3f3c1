"""What the demo shows of SDF states: words counted, and flights by carrier and hour, built by
services of two dataflows beside the flights job, and seen by the same Dagster instance.

The dataflows are `examples/sdf/words` and `examples/sdf/flights`; to write your own, begin there.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from home import PROJECT

from arroyo_dagster.dataflow.definition.loading import load_document
from arroyo_dagster.dataflow.views.view import Views
from arroyo_dagster.errors import ArroyoStateError
from arroyo_dagster.state.storage.remote.open import open_store

SDF = PROJECT / "examples" / "sdf"
WORDS = SDF / "words" / "dataflow.yaml"
FLIGHTS = SDF / "flights" / "dataflow.yaml"
DATAFLOWS = (WORDS, FLIGHTS)
LATE_MINUTES = 15


@dataclass(frozen=True, slots=True)
class Shown:
    """A state as Dagster shows it."""

    name: str
    rows: int
    epoch: int
    first: str


class States:
    """Two dataflows over the words of three sentences and the flights of one month.

    Args:
        url: where the states lie: beside the state of the flights job.
        folder: for what they read and put out.
    """

    def __init__(self, url: str, folder: Path, flights: pa.Table) -> None:
        self._url = url
        self._folder = folder
        times = flights.column("scheduled")
        first = pc.min(times)
        end = pa.scalar(first.as_py().replace(month=2, day=1, hour=0, minute=0), times.type)
        self.month = flights.filter(pc.less(times, end))

    def start(self) -> None:
        """Run both at once, in processes of their own, until they have read everything."""
        month = self._folder / "month.parquet"
        pq.write_table(self.month, month)
        answers = ["--sink", f"answers=jsonl:{self._folder / 'answers.jsonl'}"]
        given = [f"flights=parquet:{month}?rows_per_epoch=16384"]
        sinks = ["busiest", "reports", "alarms"]
        bound = [f"{topic}=jsonl:{self._folder / topic}/" for topic in sinks]
        options = [*_each("--source", given), *_each("--sink", bound), "--parallelism", "2"]
        both = {WORDS: answers, FLIGHTS: [*options, "--flush-open"]}
        pool = ThreadPoolExecutor(len(both))
        self._runs = [pool.submit(self._run, *run) for run in both.items()]
        pool.shutdown(wait=False)

    def wait(self) -> None:
        """Wait until both have ended.

        Raises:
            ArroyoStateError: a run failed.
        """
        for run in self._runs:
            run.result()

    def _run(self, file: Path, options: Sequence[str]) -> None:
        command = [sys.executable, "-m", "arroyo_dagster.cli", "sdf", "run", str(file)]
        command += [
            "--bindings",
            str(file.with_name("bindings.yaml")),
            "--url",
            self._url,
            *options,
        ]
        done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise ArroyoStateError(
                f"a dataflow ended with exit code {done.returncode}:\n{done.stderr[-2000:]}",
                path=str(file),
            )

    # ---- proof -----------------------------------------------------------------------------------

    def prove(self) -> str:
        """Compare the states with plain counts. Returns what was equal.

        Raises:
            ArroyoStateError: something is not.
        """
        store = open_store(self._url)
        views = {file: Views(store, load_document(file)) for file in DATAFLOWS}  # type: ignore[arg-type]
        words = _words(SDF / "words" / "sentences.txt")
        _equal("hits", dict(views[WORDS].view("count-words.hits").pairs()), dict(words))
        rows = views[FLIGHTS].view("punctuality.on-time").frame().iter_rows(named=True)
        found = {one["_key"]: (one["flights"], one["cancelled"], one["late"]) for one in rows}
        _equal("on-time", found, self._on_time())
        hour = views[FLIGHTS].view("hourly.departures").frame().iter_rows(named=True)
        _equal("departures", {one["_key"]: one["flights"] for one in hour}, self._last_hour())
        total = sum(flights for flights, _, _ in found.values())
        return (
            f"Equal to plain counts: {sum(words.values())} words of {len(words)} keys, "
            f"{total:,} flights of {len(found)} carriers, and the last hour's destinations."
        )

    def _on_time(self) -> dict[str, tuple[int, int, int]]:
        delay = self.month.column("dep_delay")
        late = pc.fill_null(pc.greater(delay, LATE_MINUTES), False).cast(pa.int64())
        rows = pa.table(
            {
                "carrier": self.month.column("carrier"),
                "cancelled": pc.is_null(delay).cast(pa.int64()),
                "late": late,
            }
        )
        grouped = rows.group_by("carrier").aggregate(
            [("late", "count"), ("cancelled", "sum"), ("late", "sum")]
        )
        return {
            one["carrier"]: (one["late_count"], one["cancelled_sum"], one["late_sum"])
            for one in grouped.to_pylist()
        }

    def _last_hour(self) -> dict[str, int]:
        hours = pc.floor_temporal(self.month.column("scheduled"), unit="hour")
        last = self.month.filter(pc.equal(hours, pc.max(hours)))
        return dict(Counter(last.column("dest").to_pylist()))


def live_command(url: str, folder: Path, *, rows_per_epoch: int, seconds: int) -> list[str]:
    """The command that goes on building the states of the flights, some rows every few seconds."""
    data = PROJECT / "examples" / "flights" / "data" / "flights-2013.parquet"
    sinks = [f"{topic}=jsonl:{folder / topic}/" for topic in ("busiest", "reports", "alarms")]
    return [
        *(sys.executable, "-m", "arroyo_dagster.cli", "sdf", "run", str(FLIGHTS)),
        *("--bindings", str(FLIGHTS.with_name("bindings.yaml")), "--url", url),
        *("--source", f"flights=parquet:{data}?rows_per_epoch={rows_per_epoch}"),
        *_each("--sink", sinks),
        *("--interval", str(seconds)),
    ]


def _words(file: Path) -> Counter[str]:
    return Counter(re.findall(r"[a-z']+", file.read_text().lower()))


def _each(flag: str, values: Sequence[str]) -> list[str]:
    return [part for value in values for part in (flag, value)]


def _equal(state: str, found: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    if dict(found) != dict(expected):
        keys = sorted(found.keys() ^ expected.keys()) or [
            key for key in expected if found[key] != expected[key]
        ]
        raise ArroyoStateError(
            f"the state {state} is not what a plain count gives",
            key=keys[0],
            found=found.get(keys[0]),
            expected=expected.get(keys[0]),
        )
