"""Dataflows on Spark: services as streaming queries, topics, and states as DataFrames."""
