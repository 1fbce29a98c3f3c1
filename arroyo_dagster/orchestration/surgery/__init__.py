"""State surgery in Dagster: the state of another job as an asset."""
