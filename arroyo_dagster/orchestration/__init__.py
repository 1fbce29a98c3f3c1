"""Dagster: when to act, what to show. It decides nothing about state.

Its public names are loaded when first asked for, so that naming one thing of it does not load all.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
