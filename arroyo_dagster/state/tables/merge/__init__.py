"""Merging of several files of one subtask into fewer. `planning/compaction` decides which."""
