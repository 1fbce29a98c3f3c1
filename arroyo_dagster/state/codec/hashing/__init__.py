"""The hashes with which Arroyo assigns keys to subtasks, of scalars and of columns."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
