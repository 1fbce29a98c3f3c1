"""Pipelines with operators in Python: sources, exchange, tasks, checkpoints and the coordinator.

Its public names are those of the stub beside this file, each loaded when first asked for. What the
engine does on Spark is in `arroyo_dagster.spark.engine`.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
