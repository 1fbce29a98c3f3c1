"""Plans executed on any store: compaction, gc, restore, verify, and the catalog of jobs."""
