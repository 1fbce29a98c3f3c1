"""Check that Spark's workers can run this package and see the driver's disk; send the package.

A worker without the package fails in Spark's own code, which looks like a passing fault and is
tried again. So before any work, one task per slot reports its versions. Workers that join later
fail with a final error all the same: see `tasks.fetch_rows`, and `DiskProbe.check`.
"""

from __future__ import annotations

import atexit
import functools
import importlib
import json
import os
import secrets
import shutil
import socket
import sys
import tempfile
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakSet

from arroyo_dagster.errors import InputError
from arroyo_dagster.spark.jobs import fetch_rows, slots
from arroyo_dagster.spark.settings import runs_in_process
from arroyo_dagster.spark.versions import add_archive
from arroyo_dagster.state.storage.store import ObjectStore
from arroyo_dagster.state.storage.urls import parse_url

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

OWN = "arroyo_dagster"
SHIPPED = (OWN, "lazy_loader", "tenacity")
"""The packages that can be sent: they have no compiled code."""

NEEDED = (*SHIPPED, "google.protobuf", "numpy", "polars", "pyarrow")
CLIENTS = ("obstore", "s3fs", "gcsfs", "adlfs")
"""The clients of stores. A worker needs those that the driver has loaded for its store."""

_SAME: Mapping[str, int] = {OWN: 3, "python": 2, "pyarrow": 1}
"""How many numbers of these versions must be equal. Files of one major version of pyarrow are."""

_CHECKED: WeakKeyDictionary[Any, set[str]] = WeakKeyDictionary()
_HAVE_PACKAGE: WeakSet[Any] = WeakSet()


# ---- what a worker says --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """What one task found on its worker.

    Attributes:
        host: the name of the host.
        python: the path of the interpreter.
        versions: the version of Python, and of each package that can be imported.
        sees_disk: whether the driver's file is there; None = not asked.
    """

    host: str
    python: str
    versions: Mapping[str, str]
    sees_disk: bool | None = None


def check_reports(reports: Sequence[WorkerReport], own: Mapping[str, str]) -> None:
    """Refuse workers that cannot run this package as the driver would.

    Args:
        reports: what the workers say.
        own: the versions of the driver, of all that a worker needs.

    Raises:
        InputError: a worker lacks a package, has another version, or another disk.
    """
    for report in reports:
        for name, version in own.items():
            installed = report.versions.get(name)
            if installed is None:
                raise _refused(report, f"has no {name} (the driver has {version})", own)
            numbers = _SAME.get(name)
            if numbers is not None and _numbers(installed, numbers) != _numbers(version, numbers):
                raise _refused(report, f"has {name} {installed}, the driver {version}", own)
    for report in reports:
        if report.sees_disk is False:
            raise other_disk(report.host)


def _numbers(version: str, count: int) -> list[str]:
    return version.split(".")[:count]


def _refused(report: WorkerReport, what: str, own: Mapping[str, str]) -> InputError:
    step = f"install arroyo-dagster=={own[OWN]} with the same Python and pyarrow on the workers"
    return InputError(
        f"Spark's worker {report.host} cannot run this package: it {what}",
        python=report.python,
        next_step=f"{step}, or set spark.pyspark.python to an interpreter that has them; `ship` "
        f"sends {', '.join(SHIPPED)}",
    )


def other_disk(host: str) -> InputError:
    """Return the error of a worker that does not see the files of the driver."""
    return InputError(
        f"Spark's worker {host} does not see the files that the driver writes: the checkpoint URL "
        "is on a disk that they do not share",
        worker=host,
        next_step="use a URL that every worker reaches, such as s3://, or mount one file system "
        "at this path on all hosts",
    )


# ---- asking them ---------------------------------------------------------------------------------


def check_workers(session: SparkSession, store: ObjectStore) -> DiskProbe | None:
    """Check that the workers of a session can run this package on a store, once for both.

    Nothing is asked where this process's own JVM runs the tasks.

    Returns:
        What each task checks again, as workers may join later; None where there is nothing.

    Raises:
        InputError: a worker cannot, with its name and versions.
        StorageError: tasks failed or were lost, and Spark gave up.
    """
    if runs_in_process(session):
        return None
    probe = disk_probe(store.url)
    checked = _CHECKED.setdefault(session, set())
    if store.url not in checked:
        check_reports(_ask(session, probe), _own_versions(store.url))
        checked.add(store.url)
    return probe


def _own_versions(url: str) -> dict[str, str]:
    clients = [] if parse_url(url).backend == "file" else [c for c in CLIENTS if c in sys.modules]
    needed = (*NEEDED, *clients)
    return {"python": sys.version.split()[0], **_versions(needed)}


def _versions(names: Sequence[str]) -> dict[str, str]:
    return {name: str(getattr(importlib.import_module(name), "__version__", "?")) for name in names}


def _ask(session: SparkSession, probe: DiskProbe | None) -> list[WorkerReport]:
    """Ask one task per slot. It needs nothing but Python on the workers."""
    from pyspark.sql.functions import udf

    file = None if probe is None else (probe.path, probe.content)
    ask = udf(_question([*NEEDED, *CLIENTS], file), "string", useArrow=False)
    tasks = slots(session)
    frame = session.range(0, tasks, 1, tasks)
    rows = fetch_rows(session, frame.select(ask(frame.id).alias("report")))
    return [WorkerReport(**json.loads(row.report)) for row in rows]


def _question(names: Sequence[str], file: tuple[str, str] | None) -> Callable[[int], str]:
    """Return a function that needs no module of this package: it is sent with its code."""

    def report(_: int) -> str:
        import importlib
        import json
        import socket
        import sys
        import time

        versions = {"python": sys.version.split()[0]}
        for name in names:
            try:
                module = importlib.import_module(name)
            except ImportError:
                continue
            versions[name] = str(getattr(module, "__version__", "?"))
        sees = None
        if file is not None:
            try:
                with open(file[0], encoding="utf-8") as opened:
                    sees = opened.read() == file[1]
            except OSError:
                sees = False
        # While it sleeps, the next task starts in another slot.
        time.sleep(0.05)
        facts = {"host": socket.gethostname(), "python": sys.executable}
        return json.dumps({**facts, "versions": versions, "sees_disk": sees})

    return report


# ---- one disk ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DiskProbe:
    """A file that the driver has written, and that every worker must be able to read.

    Its name is that of an object being written: no listing shows it, whatever becomes of it.
    """

    path: str
    content: str

    def check(self) -> None:
        """Refuse to work where the file is not. Runs in a worker; remembered by each.

        Raises:
            InputError: the file is not there, or another one.
        """
        if self in _CHECKED_PROBES:
            return
        try:
            same = Path(self.path).read_text(encoding="utf-8") == self.content
        except OSError:
            same = False
        if not same:
            raise other_disk(socket.gethostname())
        _CHECKED_PROBES.add(self)


_CHECKED_PROBES: set[DiskProbe] = set()


@functools.lru_cache(maxsize=64)
def disk_probe(url: str) -> DiskProbe | None:
    """Write the probe of a checkpoint URL, which goes with this process.

    Returns:
        None for a URL that is not on local disk.
    """
    parsed = parse_url(url)
    if parsed.backend != "file":
        return None
    path = Path(parsed.directory) / f"spark-workers#{secrets.randbelow(10**18)}"
    content = secrets.token_hex(16)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content, encoding="utf-8")
    atexit.register(_remove, os.getpid(), path)
    return DiskProbe(str(path), content)


def _remove(process: int, path: Path) -> None:
    if process != os.getpid():
        return
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


# ---- sending the package -------------------------------------------------------------------------


def ship_package(session: SparkSession) -> None:
    """Send this package to the workers of a session, once; see `SHIPPED`.

    The archives are unpacked beside the session's Python files, which workers can import.
    """
    if session in _HAVE_PACKAGE:
        return
    folder = _archives()
    for name in SHIPPED:
        add_archive(session, f"{folder / name}.zip#{name}")
    _HAVE_PACKAGE.add(session)


@functools.cache
def _archives() -> Path:
    """Write the archives into a folder that goes with this process: workers fetch them late."""
    folder = Path(tempfile.mkdtemp(prefix="arroyo-dagster-"))
    atexit.register(_remove, os.getpid(), folder)
    for name in SHIPPED:
        # Write an installed package as `NAME.zip`, without compiled files.
        module = importlib.import_module(name)
        root = Path(str(module.__file__)).parent
        with zipfile.ZipFile(folder / f"{name}.zip", "w", zipfile.ZIP_DEFLATED) as archive:
            for path in sorted(root.rglob("*")):
                if path.is_file() and "__pycache__" not in path.parts:
                    archive.write(path, path.relative_to(root))
    return folder
