"""Frozen values: epochs, checkpoints, tables, plans and paths. Standard library only."""
