"""State surgery on Spark: the tables of a bootstrap."""
