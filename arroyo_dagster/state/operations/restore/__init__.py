"""Rollback: return a job to an older epoch. Revision: publish its newest one with other tables."""
