"""A job taken back to an older epoch."""
