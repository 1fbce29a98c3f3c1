"""What the engine's sources and sinks keep for operations to read: watermarks, staged files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from arroyo_dagster.state.codec.bincode.codec import codec_for
from arroyo_dagster.state.model.ids import StatePath
from arroyo_dagster.state.model.types import U64

WATERMARKS = "watermark"
"""The table of a managed job's source with its watermark."""

STAGED_FILES = codec_for(list[str])
"""The commit data of a subtask of a sink that writes files to a folder: their staged paths."""


@dataclass(frozen=True, slots=True)
class SourceWatermark:
    """The value of a source's table `watermark`, for key 0."""

    watermark_micros: U64


def staged_paths(commit_data: Mapping[int, bytes]) -> list[StatePath]:
    """Return the files that a sink staged in an epoch, from the commit data of all subtasks."""
    return [StatePath(path) for data in commit_data.values() for path in STAGED_FILES.decode(data)]
