"""Compaction, gc, verify, queries and bootstraps on Spark; pipelines are in `engine`."""
