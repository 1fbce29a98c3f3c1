"""Workers that would run something else than the driver, or elsewhere, are refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from arroyo_dagster.errors import InputError
from arroyo_dagster.spark.jobs import _what_workers_lack
from arroyo_dagster.spark.workers import WorkerReport, check_reports, disk_probe
from tests.stores import LocalDiskStore

OWN = {"python": "3.11.7", "arroyo_dagster": "0.1.0", "pyarrow": "26.0.1", "numpy": "2.1.0"}


def report(versions: dict[str, str], sees_disk: bool | None = None) -> WorkerReport:
    return WorkerReport("host-7", "/usr/bin/python3", versions, sees_disk)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"python": "3.12.1"}, "it has python 3.12.1, the driver 3.11.7"),
        ({"pyarrow": "25.0.1"}, "it has pyarrow 25.0.1, the driver 26.0.1"),
        ({"arroyo_dagster": "0.1.1"}, "it has arroyo_dagster 0.1.1, the driver 0.1.0"),
        ({"numpy": None}, "it has no numpy .the driver has 2.1.0."),
    ],
)
def test_another_version_is_refused_by_host_and_final(changes: Any, message: str) -> None:
    versions = {name: v for name, v in (OWN | changes).items() if v is not None}
    with pytest.raises(InputError, match=f"worker host-7 cannot run this package: {message}") as e:
        check_reports([report(OWN), report(versions)], OWN)
    assert not e.value.retryable
    assert e.value.facts["python"] == "/usr/bin/python3"


def test_a_worker_on_another_disk_is_refused() -> None:
    with pytest.raises(InputError, match="worker host-7 does not see the files"):
        check_reports([report(OWN, sees_disk=True), report(OWN, sees_disk=False)], OWN)


def test_a_probe_is_no_object_and_is_checked_by_its_content(tmp_path: Path) -> None:
    store = LocalDiskStore(str(tmp_path / "state"))
    probe = disk_probe(store.url)
    assert probe is not None
    assert list(store.list("")) == []
    Path(probe.path).write_text("of another disk")
    with pytest.raises(InputError, match="does not see the files"):
        probe.check()
    Path(probe.path).unlink()
    with pytest.raises(InputError, match="does not see the files"):
        probe.check()
    Path(probe.path).write_text(probe.content)
    probe.check()
    assert disk_probe("s3://bucket/key") is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "x\nModuleNotFoundError: No module named 'arroyo_dagster'\ny",
            "one has no arroyo_dagster",
        ),
        ("[PYTHON_VERSION_MISMATCH] Python in worker has 3.9", "[PYTHON_VERSION_MISMATCH]"),
        ("ExecutorLostFailure (executor 1 exited)", None),
    ],
)
def test_permanent_failures_of_workers_are_recognized(text: str, expected: str | None) -> None:
    found = _what_workers_lack(text)
    assert (found is None) if expected is None else (expected in str(found))
