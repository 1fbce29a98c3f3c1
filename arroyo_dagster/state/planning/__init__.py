"""Decisions without I/O or a clock: facts in, plans or findings out."""
