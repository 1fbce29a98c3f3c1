"""Dagster definitions: when to run, what to show. Decisions about state are made in `state`.

Public names are loaded lazily, so that importing one does not load all.
"""

import lazy_loader

from arroyo_dagster.optional_packages import explained

_load, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
__getattr__ = explained(_load)
