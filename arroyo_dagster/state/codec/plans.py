"""The JSON form of compaction, rewrite and rollback plans, for dry runs. For gc see `gc.py`."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from typing import Any

from arroyo_dagster.state.model.compaction import CompactionPlan
from arroyo_dagster.state.model.rewrite import RewritePlan
from arroyo_dagster.state.model.rollback import RollbackPlan


def plan_to_json(plan: CompactionPlan | RewritePlan | RollbackPlan) -> dict[str, Any]:
    """Convert a plan to an object of JSON values, with its fields by name."""
    found: dict[str, Any] = plain_values(plan)
    return found


def plain_values(value: Any) -> Any:
    """Convert dataclasses, enums, mappings and sequences to JSON values; bytes are left out."""
    if dataclasses.is_dataclass(value):
        return {field.name: plain_values(getattr(value, field.name)) for field in _fields(value)}
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, Mapping):
        return {str(key): plain_values(one) for key, one in value.items()}
    if isinstance(value, tuple | list):
        return [plain_values(one) for one in value]
    if isinstance(value, str):
        return str(value)
    return value


def _fields(value: Any) -> list[dataclasses.Field[Any]]:
    return [f for f in dataclasses.fields(value) if not isinstance(getattr(value, f.name), bytes)]
