"""Decisions about all jobs of a checkpoint URL: which prefixes are abandoned. No I/O."""
