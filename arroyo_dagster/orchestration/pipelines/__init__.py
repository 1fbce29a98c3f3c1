"""The list of pipelines below a checkpoint URL: what they are called, read and write.

Nothing here imports Dagster. Definitions are made from the list when they load.
"""
