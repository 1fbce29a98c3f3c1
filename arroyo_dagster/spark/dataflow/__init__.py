"""Dataflows on Spark: their services as streams, their topics, and their states as DataFrames."""
