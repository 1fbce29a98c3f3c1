"""Verify pipelines: what is due, its verdict, and what Dagster shows of it."""
