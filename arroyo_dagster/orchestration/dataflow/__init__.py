"""Dataflows as assets: one per state, with lineage from topics to readers."""
