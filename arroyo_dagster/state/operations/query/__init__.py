"""Queries of state at any epoch: lazy tables, scans, look-ups. It writes nothing."""
