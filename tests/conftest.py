"""Settings of all tests: how long Hypothesis looks, and which tests share a process."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

_SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large]
settings.register_profile("dev", deadline=None, max_examples=30, suppress_health_check=_SLOW)
settings.register_profile(
    "ci",
    deadline=None,
    max_examples=60,
    derandomize=True,
    print_blob=True,
    suppress_health_check=_SLOW,
)
settings.register_profile("nightly", deadline=None, max_examples=2000, suppress_health_check=_SLOW)
settings.load_profile(
    os.environ.get("HYPOTHESIS_PROFILE") or ("ci" if os.environ.get("CI") else "dev")
)

TESTS = Path(__file__).parent
ONE_PROCESS = ("spark", "contract")
"""Folders whose tests share a server or a session, which must not be started twice."""
LONGEST_FIRST = ("spark", "journeys", "contract", "orchestration")


@pytest.hookimpl(wrapper=True)  # pytest-xdist reads the groups in the same hook
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Iterator[None]:
    """Say which tests go to one process of pytest-xdist (a file, or a folder with a server), and
    begin with what takes longest, so that no process ends alone."""
    for item in items:
        folder, name = _place(item)
        item.add_marker(pytest.mark.xdist_group(folder if folder in ONE_PROCESS else name))
    items.sort(key=lambda item: _rank(_place(item)[0]))
    yield


def _place(item: pytest.Item) -> tuple[str, str]:
    path = item.path.relative_to(TESTS)
    return path.parts[0], path.as_posix()


def _rank(folder: str) -> int:
    return LONGEST_FIRST.index(folder) if folder in LONGEST_FIRST else len(LONGEST_FIRST)
