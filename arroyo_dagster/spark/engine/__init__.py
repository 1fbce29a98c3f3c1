"""The engine on Spark: pipelines, dataflows, their sources and sinks, and what holds subtasks."""
