"""What the tests of the command line share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from arroyo_dagster import configure


@pytest.fixture
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The URL of a memory store of one test."""
    yield f"memory://{request.module.__name__.replace('.', '-')}-{tmp_path.name}"
    configure(None)
