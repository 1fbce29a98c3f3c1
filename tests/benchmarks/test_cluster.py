"""Two workers of a standalone cluster beside one, in work that needs the processor.

Workers have one core each. Other processes of the machine take time from both, so the processor
time of the workers is printed, too: what one worker used alone, over what the busier of two used,
is the speed-up of the workers on a machine of their own. What remains in the driver is the rest.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from arroyo_dagster.state import JobId, JobPaths, ParquetBackend, PipelineId, open_store
from tests.clusters.standalone import StandaloneCluster, standalone
from tests.clusters.test_kills import on
from tests.clusters.test_standalone import PROJECT

GOAL = 1.6
EPOCHS = 6
WARM_UP = 2
JOB = JobPaths(JobId("main"), PipelineId("digests"))

PROGRAM = """
import hashlib
import pyarrow as pa
from arroyo_dagster.engine.operators import Operator
from arroyo_dagster.engine.pipeline import Pipeline
from arroyo_dagster.engine.connectors import TableSource
from arroyo_dagster.state.tables.global_keyed import global_table_config

ROWS, EPOCHS = 20_000, {epochs}

class Digests(Operator):
    '''Hashes each row a few hundred times, as heavy user code does.'''

    def tables(self):
        return [global_table_config("last", key=str, value=str)]

    def on_start(self, ctx):
        self.last = ctx.table_manager.get_global_keyed_state("last", str, str)

    def process_batch(self, batch, ctx, collector):
        for key in batch["key"].to_pylist():
            digest = key.encode()
            for _ in range(400):
                digest = hashlib.md5(digest).digest()
        self.last.insert("last", digest.hex())

def pipeline():
    rows = pa.table({{
        "key": [str(number) for number in range(ROWS * EPOCHS)],
        "at": pa.array(range(ROWS * EPOCHS), pa.timestamp("us")),
    }})
    pipeline = Pipeline("digests", parallelism=2)
    source = TableSource(rows, rows_per_epoch=ROWS, splits=2)
    pipeline.source("rows", source, timestamp="at").key_by("key").apply("digests", Digests())
    return pipeline
"""


@dataclass(frozen=True, slots=True)
class Run:
    """What the epochs behind the warm-up took.

    Attributes:
        wall_seconds: between two of their ends, in the middle.
        driver_seconds: processor time of the whole run.
        worker_seconds: processor time of each worker behind the warm-up.
    """

    wall_seconds: float
    driver_seconds: float
    worker_seconds: tuple[float, ...]


def test_two_workers_beside_one_in_work_that_needs_the_processor(tmp_path: Path) -> None:
    (tmp_path / "digests.py").write_text(PROGRAM.format(epochs=EPOCHS))
    one, two = (_run(tmp_path, workers) for workers in (1, 2))
    wall = one.wall_seconds / two.wall_seconds
    alone, busier = one.worker_seconds[0], max(two.worker_seconds)
    print(
        f"\ntwo workers beside one: wall time of an epoch {one.wall_seconds:.2f} s and "
        f"{two.wall_seconds:.2f} s, ratio {wall:.2f}, goal {GOAL}"
        f"\nprocessor time of the workers: {alone:.1f} s alone, "
        f"{' and '.join(f'{one:.1f} s' for one in two.worker_seconds)} together, ratio "
        f"{alone / busier:.2f}; of the driver {one.driver_seconds:.1f} s and "
        f"{two.driver_seconds:.1f} s, start included"
    )
    assert len(two.worker_seconds) == 2


def _run(folder: Path, workers: int) -> Run:
    place = folder / f"workers-{workers}"
    (place / "state").mkdir(parents=True)
    with standalone(place, workers=workers) as cluster:
        command = [sys.executable, "-m", "arroyo_dagster.cli", "run", "digests.py:pipeline"]
        command += ["--url", str(place / "state"), "--spark", *on(cluster)]
        process = subprocess.Popen(
            command, cwd=folder, env={**os.environ, "PYTHONPATH": str(PROJECT)}
        )
        used, start = [0.0] * workers, [0.0] * workers
        store = open_store(str(place / "state"))
        before = os.times()
        while process.poll() is None:  # a worker's processes are gone when the driver ends
            used = [max(a, b) for a, b in zip(used, _worker_seconds(cluster), strict=True)]
            if len(list(store.list_dir(JOB.epochs).objects)) <= WARM_UP:
                start = used
            try:
                process.wait(0.2)
            except subprocess.TimeoutExpired:
                continue
        assert process.returncode == 0
        after = os.times()
    driver = after.children_user + after.children_system
    driver -= before.children_user + before.children_system
    behind = tuple(end - begin for end, begin in zip(used, start, strict=True))
    return Run(_wall_seconds(place / "state"), driver, behind)


def _wall_seconds(root: Path) -> float:
    backend = ParquetBackend(open_store(str(root)), JOB)
    ends = [backend.load(epoch).finish_time_micros for epoch in backend.epochs()]
    assert len(ends) > WARM_UP + 1
    gaps = sorted(later - earlier for earlier, later in pairwise(ends[WARM_UP:]))
    return gaps[len(gaps) // 2] / 1e6


def _worker_seconds(cluster: StandaloneCluster) -> list[float]:
    """The processor time of each worker's executors, and of their Python processes."""
    children: dict[int, list[int]] = {}
    seconds: dict[int, float] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        pid = int(folder.name)
        children.setdefault(int(fields[1]), []).append(pid)
        # Own time, and that of children that have ended.
        seconds[pid] = sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")

    def below(pid: int) -> float:
        return sum(seconds[one] + below(one) for one in children.get(pid, ()))

    names = sorted(name for name in cluster.daemons if name.startswith("worker"))
    return [below(cluster.daemons[name].pid) for name in names]
