"""Pipelines with operators in Python: sources, exchange, tasks, checkpoints and the coordinator.
Spark is in `arroyo_dagster.spark`.
"""
