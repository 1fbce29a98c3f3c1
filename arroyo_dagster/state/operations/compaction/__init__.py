"""Files of a job merged or rewritten as planned, and published."""
