"""Where the records of topics come from and go to: files, clocks, pipes and other services."""
