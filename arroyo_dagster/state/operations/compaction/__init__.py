"""Compaction: merge or rewrite a job's files as planned, verify the result and publish it."""
