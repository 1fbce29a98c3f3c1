"""Edits of managed jobs: published as an epoch of their own, and undone by another one. Edits of
Arroyo jobs, which are made in place, are one folder up."""
