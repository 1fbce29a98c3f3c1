"""Maintenance of a state of 10^4 data files on a cluster: the same as in process, file by file."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from arroyo_dagster.state import MemoryStore, open_store, run_compaction, run_gc, verify_job
from tests.clusters.standalone import standalone
from tests.clusters.test_connect import connect_server
from tests.clusters.test_kills import ON_CLUSTER
from tests.clusters.test_standalone import PROJECT
from tests.formats import is_compacted
from tests.jobs import run_word_job, state_of, word_job

pytestmark = pytest.mark.clusters

FILES = 10_000
ORPHANS = 500
JOB: dict[str, Any] = {
    "rows": 24_000,
    "rows_per_epoch": 150,
    "letters": "".join(map(chr, range(0x100, 0x180))),
    "keep_epochs": None,
    "merge_files_after": 1_000_000,
    "sinks": 0,
    "parallelism": 48,
    "retention_micros": 10**12,
}
PIPELINE = word_job(None, **JOB)  # type: ignore[arg-type]
PATHS = PIPELINE.paths

STEPS = """
import sys
from arroyo_dagster.state.model.compaction import CompactionPolicy, CompactionSettings
from arroyo_dagster.state.model.garbage import DAY_MICROS, PlanKind, Retention
from arroyo_dagster.state.operations.gc.plan import GcRequest

FULL = CompactionSettings(policy=CompactionPolicy.FULL)
EXPIRY = GcRequest(kind=PlanKind.EXPIRE, retention=Retention(keep_epochs=3))
ORPHANED = GcRequest(kind=PlanKind.ORPHANS, grace_micros=3 * DAY_MICROS)

def steps(store, paths, verify, compact, gc):
    '''Verify, compact, expire and delete orphans, and verify again; what each step says.'''
    before = verify(store, paths)
    merged = compact(store, paths, FULL)
    expired, orphans = gc(store, paths, EXPIRY), gc(store, paths, ORPHANED)
    after = verify(store, paths)
    engines = [*before.engines, *merged.engines, *expired.engines, *orphans.engines]
    return {
        "verified": [before.passed, after.passed],
        "merged": [merged.files_after, len(merged.merges)],
        "expired": [expired.deleted, expired.size_bytes],
        "orphans": [orphans.deleted, orphans.size_bytes],
        "engines": sorted({f"{one.step}: {one.engine.value}" for one in engines}),
    }
"""

DRIVER = f"""{STEPS}
import functools, json
from arroyo_dagster.spark.compaction import run_compaction_on_spark
from arroyo_dagster.spark.gc import run_gc_on_spark
from arroyo_dagster.spark.session import open_session
from arroyo_dagster.spark.settings import SparkSettings
from arroyo_dagster.spark.thresholds import SparkThresholds
from arroyo_dagster.spark.verify import verify_job_on_spark
from arroyo_dagster.state.operations.catalog.jobs import find_job
from arroyo_dagster.state.storage import MemoryStore
from arroyo_dagster.state.storage.remote.open import open_store

given = json.loads(sys.argv[1])
opened = open_session(SparkSettings(**given["settings"]))
always = SparkThresholds(size_bytes=0, files=0, objects=0)
verify, compact, gc = (
    functools.partial(one, lambda: opened.session, thresholds=always)
    for one in (verify_job_on_spark, run_compaction_on_spark, run_gc_on_spark)
)
store = open_store(given["url"])
print(json.dumps(steps(store, find_job(store, given["job"]), verify, compact, gc)))
opened.session.stop()
"""


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A job at rest with so many files, and orphans that are old."""
    root = tmp_path_factory.mktemp("written") / "checkpoints"
    memory = MemoryStore()  # a disk would be flushed for each file
    run_word_job(memory, **JOB)
    for one in memory.list(""):
        path = root / one.path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(memory.read(one.path))
    files = [path for path in root.rglob("*") if path.is_file()]
    data = [path for path in files if path.name.startswith("table-")]
    assert len(data) >= FILES
    for number, path in enumerate(sorted(data)[:ORPHANS]):
        orphan = path.with_name(f"{path.name}-{number:032x}")
        shutil.copyfile(path, orphan)
        os.utime(orphan, (1, 1))
    return root


@pytest.fixture(scope="module")
def expected(written: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """What the steps say in process, and what they leave."""
    root = tmp_path_factory.mktemp("here") / "checkpoints"
    shutil.copytree(written, root)
    names: dict[str, Any] = {}
    exec(STEPS, names)  # the same lines in a driver of Spark
    said = names["steps"](open_store(str(root)), PATHS, verify_job, run_compaction, run_gc)
    yield said, files_of(root), state_of(open_store(str(root)), PIPELINE)
    shutil.rmtree(root)


def files_of(root: Path) -> Counter[tuple[str, str]]:
    """The data files below a root: where they lie, and a digest of their bytes.

    A merged file has a name that no other attempt has.
    """
    found: Counter[tuple[str, str]] = Counter()
    for path in root.rglob("*"):
        if path.name.startswith("table-"):
            name = str(path.relative_to(root))
            where = name.rpartition("/")[0] if is_compacted(name) else name
            found[where, hashlib.sha256(path.read_bytes()).hexdigest()] += 1
    return found


def run_on(root: Path, **settings: Any) -> Any:
    given = {"url": str(root), "job": str(PATHS.root), "settings": settings}
    done = subprocess.run(
        [sys.executable, "-c", DRIVER, json.dumps(given)],
        env={**os.environ, "PYTHONPATH": str(PROJECT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("way", ["standalone", "connect"])
def test_a_cluster_leaves_what_this_process_leaves(
    written: Path, expected: Any, tmp_path: Path, way: str
) -> None:
    root = Path(shutil.copytree(written, tmp_path / "checkpoints"))
    with standalone(tmp_path) as cluster:
        if way == "standalone":
            said = run_on(root, master=cluster.master, conf=ON_CLUSTER)
        else:
            server = {"master": cluster.master, **ON_CLUSTER}
            with connect_server(tmp_path, sys.executable, **server) as remote:
                said = run_on(root, remote=remote)
    here, files, state = expected
    engines = said.pop("engines")
    assert said == {name: value for name, value in here.items() if name != "engines"}
    assert said["verified"] == [True, True]
    assert said["orphans"][0] == ORPHANS
    assert "merge files: Spark" in engines
    assert "delete: Spark" in engines
    assert "verify files: Spark" in engines
    assert files_of(root) == files
    assert state_of(open_store(str(root)), PIPELINE) == state
