"""Checkpoints and stores verified: facts read for `planning/verify`. Nothing here changes a job."""
