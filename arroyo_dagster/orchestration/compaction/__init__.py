"""Compaction in Dagster: assets, the sensor that requests it, and the maintenance window of running
jobs.
"""
