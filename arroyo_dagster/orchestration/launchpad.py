"""Config of runs, as a launchpad shows it: Dagster shows descriptions and enums, but no bounds."""

from typing import Any

import dagster as dg

_BOUNDS = {"ge": "At least {}.", "gt": "More than {}.", "le": "At most {}.", "lt": "Less than {}."}


class LaunchpadConfig(dg.Config):
    """Config whose descriptions end with the bounds of the fields."""

    @classmethod
    def __pydantic_init_subclass__(cls, **options: Any) -> None:
        """Add the bounds to the descriptions."""
        super().__pydantic_init_subclass__(**options)
        for field in cls.model_fields.values():
            bounds = " ".join(
                text.format(getattr(bound, name))
                for bound in field.metadata
                for name, text in _BOUNDS.items()
                if hasattr(bound, name)
            )
            if bounds and field.description and not field.description.endswith(bounds):
                field.description = f"{field.description} {bounds}"
