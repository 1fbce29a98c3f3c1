"""Bytes at a path, independent of their meaning: stores, their URLs and wrappers.

Its public names are those of the stub beside this file, each loaded when first asked for.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
