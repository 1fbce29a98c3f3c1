"""Settings of all tests: how long Hypothesis looks, and which tests share a process."""

from __future__ import annotations

import faulthandler
import gc
import logging
import os
import shutil
import signal
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from arroyo_dagster import redaction
from arroyo_dagster.state.metadata import lease
from tests import quick_spark
from tests.s3_servers import SERVERS
from tests.seeds import run_seed

_SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large]
settings.register_profile("quick", deadline=None, max_examples=5, suppress_health_check=_SLOW)
settings.register_profile("dev", deadline=None, max_examples=14, suppress_health_check=_SLOW)
settings.register_profile(
    "ci",
    deadline=None,
    max_examples=14,
    derandomize=True,
    print_blob=True,
    suppress_health_check=_SLOW,
)
settings.register_profile("nightly", deadline=None, max_examples=1400, suppress_health_check=_SLOW)
settings.load_profile(
    os.environ.get("HYPOTHESIS_PROFILE") or ("ci" if os.environ.get("CI") else "dev")
)

# Its finalizers log tracebacks, and CPython 3.11 cannot format one while it parses something else.
logging.getLogger("sqlalchemy.pool").setLevel(logging.CRITICAL)


@pytest.fixture(autouse=True)
def _secrets_of_one_test(monkeypatch: pytest.MonkeyPatch) -> None:
    """What one test registers as a secret is an ordinary word in the next."""
    monkeypatch.setattr(redaction, "_KNOWN", set())


@pytest.fixture
def restarts_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the lease of whoever died before had expired: a minute goes by for each."""
    monkeypatch.setattr(lease, "_check_free", lambda *_: None)


@pytest.fixture
def one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the calls of a store that the package makes at once one after the other."""
    from arroyo_dagster.state.operations.compaction import execute
    from arroyo_dagster.state.storage import concurrency
    from tests.in_order import InOrder

    for module in (concurrency, execute):
        monkeypatch.setattr(module, "ThreadPoolExecutor", InOrder)


@pytest.fixture
def clock() -> Any:
    """The time of a store and of who looks at it: `tests.gc_jobs.Clock`."""
    from tests.gc_jobs import Clock

    return Clock()


@pytest.fixture
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run of maintenance may be stopped between any three objects."""
    from tests.formats import objects

    monkeypatch.setattr(objects, "BATCH", 3)


ONE_PROCESS = ("spark", "contract")
"""Folders whose tests share a server or a session, which must not be started twice."""
LONGEST_FIRST = ("spark", "journeys", "contract", "orchestration")


_FAULTS = "TESTS_FAULTS"


@pytest.hookimpl(trylast=True)  # pytest's own handler writes to where nobody looks for it
def pytest_configure(config: pytest.Config) -> None:
    # `nohup make test &` starts with SIGINT ignored, and Dagster does with SIGTERM as with SIGINT:
    # what tests start would inherit both, and could not be ended. Each worker passes here.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    run_seed()  # before workers are started, which must collect the same tests
    quick_spark.begin()
    gc.disable()  # until all tests are known: what is imported meanwhile stays
    worker = getattr(config, "workerinput", None)
    if worker is None:
        os.environ[_FAULTS] = tempfile.mkdtemp(prefix="faults-")
    else:
        file = Path(os.environ[_FAULTS], worker["workerid"])
        faulthandler.enable(os.open(file, os.O_CREAT | os.O_WRONLY))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Say where a worker was that a signal ended."""
    for file in sorted(Path(os.environ[_FAULTS]).glob("*")):
        if stack := file.read_text():
            terminalreporter.section(f"a process of {file.name} was ended by a signal")
            terminalreporter.write(stack)
    shutil.rmtree(os.environ[_FAULTS], ignore_errors=True)


def pytest_collection_finish() -> None:
    """Let collections of garbage leave out what collecting tests has made."""
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)
    gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with what takes longest, so that no process ends alone."""
    items.sort(key=lambda item: _rank(item.nodeid))


def _folder(nodeid: str) -> str:
    """Of `tests/spark/test_kill.py::test_a` it is `spark`; of a file elsewhere, nothing."""
    parts = nodeid.split("::")[0].split("/")
    return parts[1] if len(parts) > 1 else ""


def _rank(nodeid: str) -> int:
    folder = _folder(nodeid)
    return LONGEST_FIRST.index(folder) if folder in LONGEST_FIRST else len(LONGEST_FIRST)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Deal tests out by the file, or by the folder that shares something."""
    from xdist.scheduler import LoadScopeScheduling

    class ByPlace(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.split("::")[0]
            folder = _folder(nodeid)
            server = next((name for name in SERVERS if f"[{name}" in nodeid), None)
            if server is not None:
                return f"{folder} {server}"
            return folder if folder in ONE_PROCESS else file

    return ByPlace(config, log)
