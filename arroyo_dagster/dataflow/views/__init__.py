"""States read by others: snapshots at one epoch, SQL over them, and how they are rendered. Nothing
here writes.
"""
