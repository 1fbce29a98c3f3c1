"""The runtime on Spark beside Spark's state APIs in Python, bytewax and a loop, on one stream.

Each program is a process of its own, and all must have equal results. `ARROYO_BENCH_BYTEWAX` names
the interpreter of an environment with bytewax and pyarrow; without it bytewax is left out.
`ARROYO_BENCH_ROUNDS` is how often this package and `transformWithStateInPandas` take turns.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.benchmarks.streams import (
    SPAN_MILLIS,
    Work,
    digest,
    expected,
    result_of,
    schema_of,
    write_stream,
)

LIMIT_SECONDS = float(os.environ.get("ARROYO_BENCH_LIMIT", "600"))
ROUNDS = int(os.environ.get("ARROYO_BENCH_ROUNDS", "3"))
BYTEWAX = os.environ.get("ARROYO_BENCH_BYTEWAX")
WARM_UP = 2
OURS, TWS, APPLY = "ours", "transformWithStateInPandas", "applyInPandasWithState"
GOAL = 2.0


@dataclass(frozen=True, slots=True)
class Reached:
    """What one process did within the limit: its rates in rows a second, one for each batch."""

    rates: tuple[float, ...]
    rows: int
    stopped: bool

    @property
    def rate(self) -> float:
        return statistics.median(self.rates)

    def __str__(self) -> str:
        spread = (
            "" if len(self.rates) == 1 else f" ({min(self.rates):,.0f} to {max(self.rates):,.0f})"
        )
        return f"{self.rate:,.0f}{spread}, {self.rows:,} rows{', stopped' if self.stopped else ''}"


@dataclass(frozen=True, slots=True)
class Stream:
    """A stream on disk, and where programs write."""

    folder: Path
    rows: int
    batch: int

    @classmethod
    def write(cls, folder: Path, rows: int, batch: int) -> Stream:
        write_stream(folder, rows, batch)
        return cls(folder, rows, batch)

    def run(self, peer: str, work: Work) -> Reached:
        """Run one program, and compare its result with the right one."""
        output = self.folder / f"{peer}-{work.value}-{time.monotonic_ns()}"
        output.mkdir()
        answer = json.loads(self._process(peer, work, output))
        batches = answer["batches"]
        if (stopped := answer.get("stopped", batches * self.batch < self.rows)) is False:
            assert batches * self.batch == self.rows
        # Spark puts sessions out one batch later, so of a part the results differ.
        if batches and (not stopped or work is not Work.SESSIONS):
            self._check(output, work, batches, stopped=stopped)
        if "seconds" in answer:
            rates = (batches * self.batch / answer["seconds"],)
        else:
            seconds = answer["batch_seconds"]
            counted = seconds[min(WARM_UP, max(0, len(seconds) - 1)) :]
            rates = tuple(self.batch / one for one in counted) or (0.0,)
        return Reached(rates, batches * self.batch, stopped)

    def _process(self, peer: str, work: Work, output: Path) -> str:
        common = [work.value, str(self.folder), str(output), str(LIMIT_SECONDS)]
        if peer == OURS:
            command = [sys.executable, "-m", "tests.benchmarks.stream_ours", *common]
            command.append(str(self.batch))
        elif peer in (TWS, APPLY):
            command = [sys.executable, "-m", "tests.benchmarks.stream_spark", peer, *common]
        else:
            script = str(Path(__file__).with_name("stream_bytewax.py"))
            python = BYTEWAX if peer == "bytewax" else sys.executable
            command = [str(python), script, peer, *common]
        # Tests start JVMs with options of their own; here each program has what users get.
        env = {name: value for name, value in os.environ.items() if name != "JDK_JAVA_OPTIONS"}
        done = subprocess.run(command, capture_output=True, text=True, env=env)
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout.splitlines()[-1]

    def _check(self, output: Path, work: Work, batches: int, *, stopped: bool) -> None:
        files = [
            path
            for path in output.rglob("*.parquet")
            if not {"_staging", "_temporary"} & set(path.parts)
            and not (stopped and _unfinished(path, batches))
        ]
        schema = schema_of(work)
        tables = [pq.read_table(path, partitioning=None).select(schema.names) for path in files]
        written = pa.concat_tables([table.cast(schema) for table in tables])
        found = result_of(written, work, batches * self.batch * (SPAN_MILLIS // self.rows))
        assert digest(found) == digest(expected(self.folder, work, batches))


def _unfinished(path: Path, batches: int) -> bool:
    """Whether a file is of a batch that was stopped."""
    return path.parent.name.isdecimal() and int(path.parent.name) >= batches


def _report(work: Work, stream: Stream, found: dict[str, list[Reached]]) -> None:
    load = os.getloadavg()[0]
    print(f"\n{work.value}, {stream.rows:,} rows, batches of {stream.batch:,}, load {load:.1f}")
    for peer, runs in found.items():
        for one in runs:
            print(f"  {peer}: {one} (rows a second)")
    ours = found[OURS]
    for peer in (TWS, APPLY):
        if peer in found:
            pairs = [mine.rate / other.rate for mine, other in zip(ours, found[peer], strict=False)]
            print(
                f"  ours / {peer}: {statistics.median(pairs):.2f} "
                f"({min(pairs):.2f} to {max(pairs):.2f}), goal {GOAL}"
            )


@pytest.mark.parametrize("work", list(Work))
def test_a_million_rows_beside_peers(tmp_path: Path, work: Work) -> None:
    stream = Stream.write(tmp_path / "stream", 10**6, 10**5)
    found: dict[str, list[Reached]] = {OURS: [], TWS: []}
    for _ in range(ROUNDS):
        for peer in (OURS, TWS):
            found[peer].append(stream.run(peer, work))
    for peer in ("loop", *(["bytewax"] if BYTEWAX else [])):
        found[peer] = [stream.run(peer, work)]
    _report(work, stream, found)


@pytest.mark.parametrize("work", list(Work))
def test_a_hundred_thousand_rows_beside_the_older_state_api(tmp_path: Path, work: Work) -> None:
    stream = Stream.write(tmp_path / "stream", 10**5, 10**4)
    _report(work, stream, {peer: [stream.run(peer, work)] for peer in (OURS, TWS, APPLY)})


@pytest.mark.parametrize("work", list(Work))
def test_ten_million_rows_alone(tmp_path: Path, work: Work) -> None:
    stream = Stream.write(tmp_path / "stream", 10**7, 10**5)
    _report(work, stream, {OURS: [stream.run(OURS, work)]})
