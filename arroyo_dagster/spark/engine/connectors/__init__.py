"""Spark's own streaming sources and batch sinks, for pipelines and dataflows.

Its public names are those of the stub beside this file, each loaded when first asked for.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
