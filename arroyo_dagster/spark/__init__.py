"""The same work on Spark: pipelines, compaction, gc, queries and dataflows."""
