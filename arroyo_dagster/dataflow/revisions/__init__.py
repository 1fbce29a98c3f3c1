"""Change what is stored of a dataflow between two runs: migrate states, or remove them."""
