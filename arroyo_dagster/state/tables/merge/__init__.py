"""The rows of several files of one subtask merged into fewer. What is merged is decided in
`planning/compaction`.
"""
