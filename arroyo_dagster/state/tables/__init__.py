"""The rows of one subtask: global keyed and expiring time-key tables, and how they are read,
written and merged.
"""
