"""Plans as JSON: printing one is the dry run; one that was stored can be carried out later."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from typing import Any

from arroyo_dagster.errors import FormatError, InputError
from arroyo_dagster.state.codec.records import decode_json
from arroyo_dagster.state.model.compaction import CompactionPlan
from arroyo_dagster.state.model.gc import ExpirePlan
from arroyo_dagster.state.model.ids import Epoch, StatePath


def plan_to_json(plan: CompactionPlan | ExpirePlan) -> dict[str, Any]:
    """A plan as an object of JSON values, its fields by name."""
    found: dict[str, Any] = _plain(plan)
    return found


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in _shown(value)}
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, Mapping):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(one) for one in value]
    if isinstance(value, str):
        return str(value)
    return value


def _shown(value: Any) -> list[dataclasses.Field[Any]]:
    return [f for f in dataclasses.fields(value) if not isinstance(getattr(value, f.name), bytes)]


def decode_expire_plan(data: bytes, path: str) -> ExpirePlan:
    """Read a stored expire plan.

    Raises:
        FormatError: it is none.
    """
    fields = decode_json(data, path)
    try:
        paths = {
            name: tuple(StatePath(one) for one in fields[name])
            for name in ("data", "records", "manifests")
        }
        return ExpirePlan(
            min_epoch=Epoch(int(fields["min_epoch"])),
            keep_from=Epoch(int(fields["keep_from"])),
            epochs=tuple(Epoch(int(one)) for one in fields["epochs"]),
            **paths,
        )
    except (KeyError, TypeError, ValueError, AttributeError, InputError) as error:
        raise FormatError(
            f"not an expire plan ({type(error).__name__}: {error})",
            path=path,
            next_step="make a new plan; nothing was deleted",
        ) from error
