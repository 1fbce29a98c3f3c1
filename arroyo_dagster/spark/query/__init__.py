"""State as frames of Spark: the data source `arroyo`, the types of columns. It writes nothing."""
