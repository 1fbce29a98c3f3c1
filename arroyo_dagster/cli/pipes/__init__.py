"""The process that a Dagster Pipes client starts, with `serve` for scripts of it. No Dagster."""

from __future__ import annotations

from arroyo_dagster.cli.pipes.serving import serve

__all__ = ["serve"]
