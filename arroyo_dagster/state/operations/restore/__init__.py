"""Rollback: return a job to an older epoch."""
