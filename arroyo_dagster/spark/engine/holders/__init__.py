"""Processes that hold subtasks between epochs on Spark's workers, and how tasks reach them."""
