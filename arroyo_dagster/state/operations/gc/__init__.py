"""Gc: delete or quarantine the objects that a plan names, and record that in the journal. Which
objects may be deleted is decided in `planning/gc`.
"""
