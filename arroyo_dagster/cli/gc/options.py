"""What the commands of gc share: jobs of which only the journal is left, and waiting."""

from __future__ import annotations

import time

from arroyo_dagster.cli.rendering import print_beside_progress


def wait_for_deletions(seconds: float) -> None:
    print_beside_progress(
        f"the epoch is outside its job's retention: waiting {seconds:.0f} seconds for deletions "
        "in flight"
    )
    time.sleep(seconds)
