"""Read states: snapshots at one epoch, SQL over them, and their rendering. Nothing here writes."""
