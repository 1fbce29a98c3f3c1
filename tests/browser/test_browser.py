"""What a person sees of the assets, checks, plots, failed runs and ticks in Dagster's UI.

It needs Chromium, and is part of `make soak`: the pages take half a minute.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.browser.chromium import chromium, find_chromium
from tests.browser.pictures import shots
from tests.browser.prepared import prepared


@pytest.mark.soak
@pytest.mark.skipif(
    find_chromium() is None, reason="the command `chromium` is missing (Debian: chromium)"
)
def test_the_pages_show_what_they_are_for(tmp_path: Path) -> None:
    with prepared(tmp_path) as dagster, chromium() as page:
        for shot in shots(dagster.go_through()):
            shot.show(page, dagster.url)
