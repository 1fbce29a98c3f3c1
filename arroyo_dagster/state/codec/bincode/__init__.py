"""Bincode as Arroyo writes it: values and columns to bytes and back, independent of tables."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
