"""The Dagster instance of the examples: kept below the project, so that it remembers."""

from __future__ import annotations

from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]
HOME = PROJECT / ".dagster"

_SETTINGS = """\
# Written by the examples; change it as you like, it is written once.
telemetry: {enabled: false}
nux: {enabled: false}
concurrency:
  pools: {granularity: op, default_limit: 1}
  runs:
    max_concurrent_runs: 4
    tag_concurrency_limits:
      - {key: arroyo/job_id, value: {applyLimitPerUniqueValue: true}, limit: 1}
run_monitoring: {enabled: true, free_slots_after_run_end_seconds: 300}
retention: {sensor: {purge_after_days: {skipped: 1, success: 7, failure: 7}}}
"""


def dagster_home(folder: Path | None = None) -> Path:
    """The instance's folder, made on first use; below the project unless given."""
    home = folder or HOME
    home.mkdir(parents=True, exist_ok=True)
    settings = home / "dagster.yaml"
    if not settings.exists():
        settings.write_text(_SETTINGS)
    return home
