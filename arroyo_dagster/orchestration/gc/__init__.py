"""Garbage collection in Dagster: plans, approvals and runs as assets."""
