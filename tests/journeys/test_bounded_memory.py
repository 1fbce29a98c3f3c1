"""Memory stays bounded however large the objects are: measured as peak RSS of a process."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

QUARANTINE = """
    import os, resource, sys
    from pathlib import Path
    from arroyo_dagster.state.local.collecting import collect
    from arroyo_dagster.state.local.undelete import undelete
    from arroyo_dagster.state.storage import open_store
    from tests.collecting import orphans
    from tests.contract.test_collecting import LOST, PATHS, STOPPED
    from tests.fleets import Written

    root, count, size = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    store = open_store(f"file://{root}", options={"sync": False})
    Written(store, PATHS).epochs(4)
    store.put(LOST, b"")
    first = next(root.rglob("*-lost"))
    for number in range(count):
        file = first.with_name(f"{first.name}{number}")
        with open(file, "wb") as opened:
            opened.truncate(size)
            opened.write(b"%d" % number)
        os.utime(file, (1_700_000_000, 1_700_000_000))
    peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    before = peak()
    moved = collect(store, PATHS, orphans(**STOPPED), yes=True, aside=True)
    assert moved.deleted == count
    assert len(list(root.rglob("*-lost*"))) == 1
    back = undelete(store, PATHS, str(moved.quarantine), yes=True)
    assert len(back) == count
    assert sorted(f.stat().st_size for f in first.parent.glob("*-lost?*")) == [size] * count
    print(peak() - before)
"""


def test_quarantine_and_undelete_hold_pieces_of_objects_not_objects(tmp_path: Path) -> None:
    """Was 2.4 GB for 24 objects of 100 MB: each was read whole, sixteen at a time."""
    grown = int(run(QUARANTINE, str(tmp_path / "root"), "8", str(48 * 2**20)))
    assert grown < 200 * 2**20


def run(code: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
