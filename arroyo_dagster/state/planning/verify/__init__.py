"""Findings on checkpoints, jobs and fleets, from facts that `operations/verify` reads."""
