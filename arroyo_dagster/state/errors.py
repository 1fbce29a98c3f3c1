"""The root of the errors by the name of Arroyo's state crate, of `arroyo_dagster.errors`."""

from arroyo_dagster.errors import StateError

__all__ = ["StateError"]
