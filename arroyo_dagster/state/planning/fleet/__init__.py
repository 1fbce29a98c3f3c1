"""Decisions about all jobs of a checkpoint URL: what is abandoned, and what a tenant
costs. No I/O."""
