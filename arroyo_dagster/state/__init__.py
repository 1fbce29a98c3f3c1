"""The shared state package: read, write, verify and query the checkpoint state of streaming jobs.

Its public names are those of the stub beside this file, each loaded when first asked for. Neither
dagster nor pyspark is ever imported.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
