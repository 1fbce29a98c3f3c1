"""The Dagster instances of the examples: each keeps its own, beside the jobs that it shows."""

from __future__ import annotations

from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]

_SETTINGS = """\
# Written by the examples; change it as you like, it is written once.
telemetry: {enabled: false}
nux: {enabled: false}
concurrency:
  pools: {granularity: run, default_limit: 1}
  runs: {max_concurrent_runs: 4}
run_monitoring: {enabled: true, free_slots_after_run_end_seconds: 300}
retention: {sensor: {purge_after_days: {skipped: 1, success: 7, failure: 7}}}
"""


def dagster_home(folder: Path) -> Path:
    """The instance's folder, made on first use."""
    folder.mkdir(parents=True, exist_ok=True)
    settings = folder / "dagster.yaml"
    if not settings.exists():
        settings.write_text(_SETTINGS)
    return folder
