"""The demo: the flights job on Spark, killed half way, started again, finished, proved; seen,
compacted while it runs, and expired through Dagster; and states built by two dataflows.

    make demo                                           on Spark
    python examples/flights/demo.py --in-process        without

Works in `.demo/flights/` below the project, fresh each time. Exit code 0: everything was equal.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

import pyarrow.parquet as pq
from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from verify import FLIGHTS, JOB, Proof, explain, prove

from arroyo_dagster.errors import ArroyoStateError, NotFoundError
from arroyo_dagster.spark.session import JAVA_STEP, local_java
from arroyo_dagster.state.metadata.backend import ParquetBackend
from arroyo_dagster.state.model.checkpoints import Checkpoint
from arroyo_dagster.state.storage.remote.open import open_store

if TYPE_CHECKING:
    from states import Shown, States

PROJECT = Path(__file__).resolve().parents[2]
FOLDER = PROJECT / ".demo" / "flights"
ARROYO_STATE = (str(Path(sys.executable).with_name("arroyo-state")),)
PARALLELISM = 2
ROWS_PER_EPOCH = 16_384
SECONDS_BETWEEN_EPOCHS = 0.4  # of run 2, so that it still goes on when its files are merged
KEPT_EPOCHS = 2
STALLED_SECONDS = 120
LOG_LINES = 15
STEPS = 6
NEEDED_BYTES = 200_000_000


class DemoError(Exception):
    """The demo did not come out as it must; the message says what to look at."""


# ---- the job, from outside -----------------------------------------------------------------------


class Job:
    """The flights job: started as a user would, watched through the state package."""

    def __init__(self, *, spark: bool, rows: int) -> None:
        self.url = str(FOLDER / "checkpoints")
        self.output = str(FOLDER / "output")
        self.spark = spark
        self.rows_per_epoch = ROWS_PER_EPOCH
        self.epochs = -(-rows // self.rows_per_epoch)
        self._backend = ParquetBackend(open_store(self.url), JOB)

    def epoch(self) -> int:
        """The newest epoch; 0 while there is none."""
        try:
            return max(self._backend.epochs(), default=0)
        except NotFoundError:
            return 0

    def newest(self) -> Checkpoint:
        """The newest checkpoint."""
        return self._backend.load()

    def epochs_kept(self) -> int:
        """How many epochs can be restored."""
        return len(self._backend.epochs())

    def size(self) -> tuple[int, int]:
        """How many files the job's state has, and their bytes; what Spark keeps there left out."""
        sizes = [
            info.size_bytes
            for info in self._backend.store.list(JOB.root)
            if not info.path.startswith(JOB.maintenance)
        ]
        return len(sizes), sum(sizes)

    def start(self, number: int, seconds_between_epochs: float = 0.0) -> Run:
        """Start the job in a process of its own."""
        how = ["--url", self.url, "--interval", str(seconds_between_epochs)]
        where = ["--spark"] if self.spark else []
        return Run(
            [*ARROYO_STATE, "run", "examples/flights/pipeline.py:pipeline", *how, *where],
            {
                "FLIGHTS_OUTPUT": self.output,
                "FLIGHTS_ROWS_PER_EPOCH": str(self.rows_per_epoch),
                "FLIGHTS_PARALLELISM": str(PARALLELISM),
            },
            FOLDER / f"run-{number}.log",
        )


class Run:
    """One process of the job, and all processes it starts; ended on leaving the context."""

    def __init__(self, command: list[str], settings: dict[str, str], log: Path) -> None:
        self.log = log
        with log.open("wb") as output:
            # A session of its own: a signal to its group reaches Spark's JVM too, and never us.
            self._process = subprocess.Popen(
                command,
                cwd=PROJECT,
                env={**os.environ, **settings},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.pid = self._process.pid

    def __enter__(self) -> Run:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self.running:
            self._signal(signal.SIGTERM)
            try:
                self._process.wait(5)
            except subprocess.TimeoutExpired:
                self.kill()

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def kill(self) -> None:
        """End it with SIGKILL: no handler runs, nothing is flushed."""
        self._signal(signal.SIGKILL)
        self._process.wait()

    def _signal(self, number: signal.Signals) -> None:
        try:
            os.killpg(self.pid, number)
        except ProcessLookupError:
            return  # it has just ended by itself

    def check_ended_well(self) -> None:
        """Raise DemoError unless it ended with exit code 0."""
        code = self._process.wait()
        if code != 0:
            raise DemoError(f"the job ended with exit code {code}.\n{self.last_words()}")

    def last_words(self) -> str:
        """The end of its log, and where the whole of it lies."""
        lines = self.log.read_text(errors="replace").splitlines()[-LOG_LINES:]
        return "\n".join([f"The end of {_shown(self.log)}:", *(f"  {line}" for line in lines)])


def _shown(path: Path) -> str:
    return str(path.relative_to(PROJECT))


# ---- progress ------------------------------------------------------------------------------------


class Show:
    """Says how far the job is: a bar in a terminal, else a line now and then."""

    SECONDS_BETWEEN_LINES = 2.0

    def __init__(self, console: Console, epochs: int) -> None:
        self._console = console
        self._epochs = epochs
        self._bar: Progress | None = None
        self._phase = ""
        self._said_at = 0.0
        self._said_epoch = -1
        self._step = 0
        self._begun = time.monotonic()

    def step(self, text: str) -> None:
        """Begin the next step: what it shows, and how far the demo is."""
        self._step += 1
        seconds = time.monotonic() - self._begun
        self.say(f"\n{self._step} of {STEPS}  {text} ({seconds:.0f} s so far)")

    @contextmanager
    def bar(self) -> Iterator[Show]:
        """Show a bar, where there is a terminal."""
        if not self._console.is_terminal:
            yield self
            return
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("epoch"),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
        )
        with Progress(*columns, console=self._console, transient=True) as self._bar:
            self._bar.add_task("", total=self._epochs)
            yield self
        self._bar = None

    def say(self, text: str) -> None:
        """A line that stays."""
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def phase(self, text: str) -> None:
        """What the next epochs are written by."""
        self._phase = text
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], description=text)

    def epoch(self, epoch: int) -> None:
        """The newest epoch is `epoch`."""
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=min(epoch, self._epochs))
            return
        now = time.monotonic()
        if epoch != self._said_epoch and now - self._said_at >= self.SECONDS_BETWEEN_LINES:
            self._said_at, self._said_epoch = now, epoch
            self.say(f"  {self._phase}: epoch {epoch} of about {self._epochs}")


# ---- the story -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """What one run, or all of them, did.

    Attributes:
        rows: flights read.
        files, size_bytes: of the job's state.
    """

    ended: str
    epochs: int
    rows: int
    files: int
    size_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Kept:
    """What there is of a job: its epochs, all its files, and those that the newest epoch lists."""

    name: str
    epochs: int
    files: int
    size_bytes: int
    listed: int


class Story:
    """Two runs of one job, one after the other, and what Dagster does meanwhile."""

    def __init__(self, job: Job, show: Show) -> None:
        self.accounts: list[Account] = []
        self._job = job
        self._show = show
        self._poll_seconds = 0.1 if job.spark else 0.02

    def play(self) -> None:
        """Run the job to its end, with a kill on the way.

        Raises:
            DemoError: a run did not do what it was to do.
        """
        killed_at = self._job.epochs * 2 // 5
        self._show.step(f"A crash: run the job, and kill it with SIGKILL at epoch {killed_at}.")
        if not self._job.spark:
            self._load_dagster()
        with self._run(1, f"run 1, to be killed at epoch {killed_at}") as run:
            if self._job.spark:
                self._load_dagster()  # while Spark starts
            self._until(run, killed_at)
            run.kill()
            self._account("killed (SIGKILL)")
        self._show.say(f"  Dagster's sensor: {self._upkeep.tick()}.")
        self._show.step(
            "A restart: continue from the newest epoch to the end, and be compacted meanwhile."
        )
        with self._run(2, "run 2, compacted meanwhile, to the end") as run:
            self._until(run, self._job.epoch() + 1)
            self._compact_meanwhile(run)
            self._until_end(run)
            self._check_exhausted()
            self._account("read everything")

    def _load_dagster(self) -> None:
        from upkeep import Upkeep

        self._upkeep = Upkeep(self._job.url, home=FOLDER / "dagster")

    def keep_small(self) -> list[Kept]:
        """Compact the job at rest, and expire all but its newest epochs. Returns what was there
        before, between and after."""
        steps = [self._kept("as the job left it")]
        self._upkeep.tick()
        done = self._upkeep.compact(policy="full")
        self._show.say(
            f"  compacted at rest: listed files {done['files']}, "
            f"in epoch {done['arroyo/taken_over_at_epoch']}."
        )
        steps.append(self._kept("compacted"))
        gone = self._upkeep.expire(KEPT_EPOCHS)
        self._show.say(
            f"  expired epochs: {gone['epochs']}; with them went the data files that only they "
            f"listed: {gone['data files']}."
        )
        steps.append(self._kept(f"expired to {KEPT_EPOCHS} epochs"))
        self._upkeep.tick()
        self._show.say(f"  Dagster's check {self._upkeep.verify()}.")
        return steps

    def build_states(self, states: States) -> list[Shown]:
        """Wait for the states of two dataflows, and let Dagster see them. Returns what it shows."""
        self._show.step(
            f"States declared in YAML (SDF): count words, and {states.month.num_rows:,} flights by "
            "carrier and hour in process."
        )
        states.wait()
        self._show.say(f"  {states.prove()}")
        self._show.say(f"  Dagster's sensor: {self._upkeep.tick()}.")
        return self._upkeep.states()

    def _kept(self, name: str) -> Kept:
        files, size = self._job.size()
        listed = len(set(self._job.newest().paths))
        return Kept(name, self._job.epochs_kept(), files, size, listed)

    def _compact_meanwhile(self, run: Run) -> None:
        before = self._job.epoch()
        done = self._upkeep.compact(policy="bin-pack", wait_seconds=STALLED_SECONDS)
        if "arroyo/taken_over_at_epoch" not in done:
            raise DemoError(f"the job did not take over what was merged.\n{run.last_words()}")
        self._show.say(
            f"  compacted while it runs: listed files {done['files']}; "
            f"planned at epoch {done['arroyo/planned_at_epoch']}, "
            f"taken over by epoch {done['arroyo/taken_over_at_epoch']}, "
            f"{self._job.epoch() - before} epochs written meanwhile."
        )

    @contextmanager
    def _run(self, number: int, phase: str) -> Iterator[Run]:
        self._show.phase(phase)
        self._started = time.monotonic()
        self._before = self._facts()
        between = SECONDS_BETWEEN_EPOCHS if number == 2 else 0.0
        with self._job.start(number, between) as run:
            self._show.say(
                f"  run {number} starts{' Spark' if self._job.spark else ''} (process {run.pid}), "
                f"from epoch {self._before.epochs}"
            )
            yield run

    def _until(self, run: Run, epoch: int) -> None:
        """Wait until the job has written `epoch`."""
        waiting = _Patience(STALLED_SECONDS)
        while (now := self._job.epoch()) < epoch:
            self._show.epoch(now)
            if not run.running:
                raise DemoError(
                    f"the job ended at epoch {now}, before epoch {epoch}.\n{run.last_words()}"
                )
            if waiting.is_over(now):
                raise DemoError(
                    f"no epoch after {now} within {STALLED_SECONDS} seconds.\n{run.last_words()}"
                )
            time.sleep(self._poll_seconds)
        self._show.epoch(now)

    def _until_end(self, run: Run) -> None:
        """Wait until the process ends by itself."""
        waiting = _Patience(STALLED_SECONDS)
        while run.running:
            now = self._job.epoch()
            self._show.epoch(now)
            if waiting.is_over(now):
                raise DemoError(
                    f"neither an epoch after {now} nor an end within {STALLED_SECONDS} "
                    f"seconds.\n{run.last_words()}"
                )
            time.sleep(self._poll_seconds)
        run.check_ended_well()

    def _check_exhausted(self) -> None:
        progress = self._job.newest().progress
        if progress is None or not progress.exhausted:
            raise DemoError("the job ended before it had read everything")

    def _facts(self) -> Account:
        epoch = self._job.epoch()
        if not epoch:
            return Account(ended="", epochs=0, rows=0, files=0, size_bytes=0, seconds=0)
        progress = self._job.newest().progress
        offsets = json.loads(progress.offsets) if progress else {"departures": {"row": 0}}
        files, size = self._job.size()
        rows = offsets["departures"]["row"]
        return Account(ended="", epochs=epoch, rows=rows, files=files, size_bytes=size, seconds=0)

    def _account(self, ended: str) -> None:
        before, now = self._before, self._facts()
        account = Account(
            ended=ended,
            epochs=now.epochs - before.epochs,
            rows=now.rows - before.rows,
            files=now.files - before.files,
            size_bytes=now.size_bytes - before.size_bytes,
            seconds=time.monotonic() - self._started,
        )
        self.accounts.append(account)
        self._show.say(f"  {ended} at epoch {now.epochs}, after {account.seconds:.1f} s.")


class _Patience:
    """Ends when no epoch came for so many seconds."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._epoch = -1
        self._since = time.monotonic()

    def is_over(self, epoch: int) -> bool:
        if epoch != self._epoch:
            self._epoch, self._since = epoch, time.monotonic()
        return time.monotonic() - self._since > self._seconds


# ---- the end -------------------------------------------------------------------------------------


def _table(accounts: list[Account], proof: Proof, seconds: float) -> Table:
    table = Table(title="What the job wrote", title_justify="left")
    for name in ("run", "epochs", "rows", "files", "bytes", "seconds"):
        table.add_column(name, justify="left" if name == "run" else "right")
    table.add_column("how it ended")
    for number, account in enumerate(accounts, start=1):
        table.add_row(
            str(number), *_cells(account), account.ended, end_section=number == len(accounts)
        )
    whole = Account(
        ended="a restart, and proof",
        epochs=proof.epoch,
        rows=sum(account.rows for account in accounts),
        files=sum(account.files for account in accounts),
        size_bytes=sum(account.size_bytes for account in accounts),
        seconds=seconds,
    )
    table.add_row("all", *_cells(whole), whole.ended)
    return table


def _cells(account: Account) -> tuple[str, ...]:
    return (
        str(account.epochs),
        f"{account.rows:,}",
        f"{account.files:,}",
        decimal(account.size_bytes),
        f"{account.seconds:.1f}",
    )


def _say(show: Show, proof: Proof) -> None:
    if proof.differences:
        raise DemoError(explain(proof))
    show.say(f"  {explain(proof)}")


def _kept_table(steps: list[Kept]) -> Table:
    table = Table(title="What Dagster kept of it", title_justify="left")
    table.add_column("state")
    for name in ("epochs", "files", "bytes", "files a restore reads"):
        table.add_column(name, justify="right")
    for kept in steps:
        size = decimal(kept.size_bytes)
        table.add_row(kept.name, f"{kept.epochs:,}", f"{kept.files:,}", size, f"{kept.listed:,}")
    return table


def _states_table(shown: list[Shown]) -> Table:
    table = Table(title="States, as Dagster shows them", title_justify="left")
    table.add_column("state")
    for name in ("keys", "epoch"):
        table.add_column(name, justify="right")
    table.add_column("the first row")
    for one in shown:
        table.add_row(one.name, f"{one.rows:,}", str(one.epoch), one.first)
    return table


def _next_steps(job: Job) -> list[str]:
    command = os.path.relpath(ARROYO_STATE[0], PROJECT)
    root = JOB.root
    return [
        "make ui: the same in Dagster's UI, on a job that goes on, with an instance of its own",
        f"{command} jobs --url {job.url}",
        f"{command} show {root} --url {job.url}",
        f"{command} rows {root} aircraft totals --url {job.url}",
        f"{command} sdf show examples/sdf/words/dataflow.yaml count-words/hits --url {job.url}",
        f"{_shown(Path(__file__).with_name('pipeline.py'))}: the operators, to read; "
        "examples/sdf: the dataflows",
    ]


def demo(console: Console, *, spark: bool) -> None:
    """Play the story, prove the result, show the account.

    Raises:
        DemoError: it did not come out as it must.
        ArroyoStateError: the state could not be read.
    """
    started = time.monotonic()
    _check_machine(spark=spark)
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    flights = pq.read_table(FLIGHTS)
    job = Job(spark=spark, rows=flights.num_rows)
    show = Show(console, job.epochs)
    show.say(
        f"A year of New York flights, {flights.num_rows:,} rows, in about {job.epochs} epochs "
        f"{'on Spark' if spark else 'in process'}, parallelism {PARALLELISM}; {STEPS} steps, "
        f"about {'a minute' if spark else 'half a minute'}; folder {_shown(FOLDER)}."
    )
    story = Story(job, show)
    with show.bar():
        story.play()
        from states import States

        states = States(job.url, FOLDER, flights)
        states.start()  # they are built while the job is proved and maintained
        show.step("Proof: tables and output equal a group-by of the flights in pyarrow.")
        proof = prove(job.url, job.output, flights)
        _say(show, proof)
        show.step(f"Maintenance: compact the job at rest, expire all but {KEPT_EPOCHS} epochs.")
        steps = story.keep_small()
        show.step("Proof again: what a restore loads now still equals the group-by.")
        again = prove(job.url, job.output, flights)
        _say(show, again)
        shown = story.build_states(states)
    console.print()
    console.print(_table(story.accounts, proof, time.monotonic() - started))
    console.print(_kept_table(steps))
    console.print(_states_table(shown))
    console.print("What to look at next:")
    for line in _next_steps(job):
        console.print(f"  {line}", highlight=False, markup=False, soft_wrap=True)


def _check_machine(*, spark: bool) -> None:
    """Raise DemoError if the job could only fail."""
    problem = local_java().problem if spark else None
    if problem is not None:
        raise DemoError(f"{problem}. Next: {JAVA_STEP}")
    free = shutil.disk_usage(PROJECT).free
    if free < NEEDED_BYTES:
        raise DemoError(
            f"the disk of {PROJECT} is too full: {NEEDED_BYTES // 10**6} MB are needed, "
            f"{free // 10**6} MB are free. Next: free some space"
        )


def main() -> int:
    """Run the demo. Returns the exit code."""
    parser = argparse.ArgumentParser(description="Run the flights job, and prove what it wrote.")
    parser.add_argument(
        "--in-process", action="store_true", help="without Spark: one process, no JVM"
    )
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, _interrupted)
    try:
        demo(Console(), spark=not options.in_process)
    except KeyboardInterrupt:
        print("Interrupted; the job was ended.", file=sys.stderr)
        return 130
    except (DemoError, ArroyoStateError, OSError) as error:
        print(f"The demo failed: {error}", file=sys.stderr)
        return 1
    return 0


def _interrupted(number: int, frame: object) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
