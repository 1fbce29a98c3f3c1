"""The hashes by which Arroyo routes keys to subtasks, of scalars and of columns."""
