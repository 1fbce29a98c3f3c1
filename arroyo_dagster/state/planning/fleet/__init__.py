"""Decisions about all jobs of a checkpoint URL: what is abandoned, what a tenant costs, and which
maintenance meets a service level. No I/O."""
