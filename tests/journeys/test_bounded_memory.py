"""Memory stays bounded however large the objects are: measured as peak RSS of a process."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.shares import Share, dealt_out

PEAK = """
    def peak():
        # Of this program alone: ru_maxrss begins with what the process that started it had.
        status = Path("/proc/self/status").read_text()
        return int(status.partition("VmHWM:")[2].split()[0]) * 1024
"""
QUARANTINE = """
    import os, sys, time
    from pathlib import Path
    from arroyo_dagster.state.operations.gc.execute import GcOptions, run_gc
    from arroyo_dagster.state.operations.gc.undelete import run_undelete
    from arroyo_dagster.state.storage import open_store
    from tests.gc_jobs import orphans
    from tests.contract.test_gc import LOST, PATHS, STOPPED
    from tests.fleets import Written

    PEAK
    root, count, size = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    store = open_store(f"file://{root}", options={"sync": False})
    Written(store, PATHS, start=time.time_ns() // 1000).epochs(4)
    store.put(LOST, b"")
    first = next(root.rglob("*-lost"))
    for number in range(count):
        file = first.with_name(f"{first.name}{number}")
        with open(file, "wb") as opened:
            opened.truncate(size)
            opened.write(b"%d" % number)
        os.utime(file, (1_700_000_000, 1_700_000_000))
    before = peak()
    moved = run_gc(store, PATHS, orphans(**STOPPED), GcOptions(quarantine=True))
    assert moved.deleted == count
    assert len(list(root.rglob("*-lost*"))) == 1
    back = run_undelete(store, PATHS, str(moved.quarantine))
    assert len(back) == count
    assert sorted(f.stat().st_size for f in first.parent.glob("*-lost?*")) == [size] * count
    print(peak() - before)
"""


pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def test_quarantine_and_undelete_hold_pieces_of_objects_not_objects(tmp_path: Path) -> None:
    """Was 2.4 GB for 24 objects of 100 MB: each was read whole, sixteen at a time."""
    grown = int(run(QUARANTINE, str(tmp_path / "root"), "6", str(48 * 2**20)))
    assert grown < 200 * 2**20


def run(code: str, *arguments: str) -> str:
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            textwrap.dedent(code).replace("PEAK", textwrap.dedent(PEAK)),
            *arguments,
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


GIANT = """
    import os, resource, sys, time
    from pathlib import Path
    from arroyo_dagster.errors import ArroyoStateError, FormatError
    from arroyo_dagster.state.metadata.backend import ParquetBackend
    from arroyo_dagster.state.metadata.lease import lease
    from arroyo_dagster.state.operations.gc.plan import plan_gc
    from arroyo_dagster.state.operations.catalog.epoch_summaries import list_epochs
    from arroyo_dagster.state.operations.catalog.jobs import summarise_jobs
    from arroyo_dagster.state.operations.gc.pins import pin_epoch
    from arroyo_dagster.state.operations.verify.job import verify_job
    from arroyo_dagster.state.storage import open_store
    from tests.gc_jobs import JOB, orphans
    from tests.fleets import Written, legacy_job
    from tests.jobs import run_word_job, word_job

    PEAK
    root = Path(sys.argv[1])
    store = open_store(f"file://{root}", options={"sync": False})
    job = {**JOB, "sinks": 1, "parallelism": 1}
    if sys.argv[2] == "protocol":
        run_word_job(store, **job, max_epochs=3)
        paths = word_job(store, **job).paths
    else:
        paths = legacy_job("job")
        Written(store, paths, start=time.time_ns() // 1000).epochs(3)
    pin_epoch(store, paths, 2, reason="test")
    with lease(store, paths, "earlier"):
        pass

    def take_lease():
        with lease(store, paths, "somebody"):
            pass

    actions = {
        "jobs": lambda: summarise_jobs(store),
        "epochs": lambda: list_epochs(store, paths),
        "verify": lambda: verify_job(store, paths),
        "load": lambda: ParquetBackend(store, paths).prepare_checkpoint_load(3),
        "gc": lambda: plan_gc(store, paths, orphans(**{str(paths.root): "stopped"})),
        "lease": take_lease,
    }
    if sys.argv[2] == "protocol":
        actions["run"] = lambda: run_word_job(store, **job, max_epochs=0)
    for act in actions.values():
        act()
    resource.setrlimit(resource.RLIMIT_AS, (8 * 2**30, 8 * 2**30))
    refused = set()
    first, of = map(int, sys.argv[3:])
    for number, file in enumerate(sorted(path for path in root.rglob("*") if path.is_file())):
        if not file.exists():
            continue
        kept = file.read_bytes()
        for at, (name, act) in enumerate(actions.items()):
            if (number + at) % of != first:
                continue
            os.truncate(file, 20 * 2**30)
            try:
                act()
            except FormatError as error:
                refused.add((file.name, name))
                print(name, "FormatError", error.message)
            except ArroyoStateError as error:
                print(name, type(error).__name__, error)
                assert not error.retryable, (file, name, error)
            if file.exists():
                file.write_bytes(kept)
    assert peak() < 700 * 2**20, peak()
"""


@pytest.mark.parametrize(("layout", "share"), dealt_out(["protocol", "legacy"], 3))
def test_an_object_of_20_gb_is_refused_by_its_size(
    tmp_path: Path, layout: str, share: Share
) -> None:
    """Sparse files: each object of a job in turn, in each thing that is done with a job."""
    said = run(GIANT, str(tmp_path / "root"), layout, str(share.first), str(share.of))
    assert "larger than the limit of a record: 21474836480 bytes, expected at most 1048576" in said
    assert "larger than the limit of a metadata object: 21474836480 bytes" in said
