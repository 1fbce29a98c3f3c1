"""State by key of one subtask: values, lists, maps and timers, in memory as columns and stored as
generational expiring tables. Tables that every subtask reads in full are in `tables.global_keyed`.
"""
