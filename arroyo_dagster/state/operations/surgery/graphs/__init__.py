"""The graphs of pipelines: found and decoded. Matching by them is in `planning`, not here."""
