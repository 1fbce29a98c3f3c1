"""Run pipelines, compaction, gc, queries and dataflows on Spark."""
