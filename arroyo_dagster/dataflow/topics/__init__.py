"""Sources and sinks of topics: files, generated numbers, pipes and other services."""
