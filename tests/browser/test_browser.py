"""What a person sees of the assets, checks, plots, failed runs and ticks in Dagster's UI.

It needs Chromium, and is part of `make soak`: the pages take half a minute.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.browser.chromium import chromium, find_chromium
from tests.browser.many import many, opened
from tests.browser.pictures import shots
from tests.browser.prepared import prepared

pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif(
        find_chromium() is None, reason="the command `chromium` is missing (Debian: chromium)"
    ),
]


def test_the_pages_show_what_they_are_for(tmp_path: Path) -> None:
    with prepared(tmp_path) as dagster, chromium() as page:
        for shot in shots(dagster.go_through()):
            shot.show(page, dagster.url)


def test_pages_of_a_thousand_pipelines_open_in_ten_seconds(tmp_path: Path) -> None:
    """Or, on a loaded machine, in three times what a page takes that shows none of them."""
    with many(tmp_path, 1_000) as dagster, chromium() as page:
        nothing, *others = opened(page, dagster, 1_000, None)
    for one in others:
        print(f"{one.name}: {one.seconds:.1f} s; a page of nothing: {nothing.seconds:.1f} s")
    assert max(one.seconds for one in others) < max(10.0, 3 * nothing.seconds)
