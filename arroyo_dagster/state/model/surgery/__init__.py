"""Edits of the state of stopped jobs as values: requests, plans, outcomes and records."""
