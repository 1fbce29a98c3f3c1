"""Edits of the state of stopped Arroyo jobs: plan, execute, find a key. For undo see
`operations.undo`.
"""
