"""Verification of checkpoints and stores: reads facts for `planning/verify`. It changes no job."""
