"""gc in Dagster: plans, approvals and runs as assets."""
