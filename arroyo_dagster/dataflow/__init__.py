"""SDF keyed states in one process: YAML definitions, the services that write states, and the views
that read them.

The public names for users are in `arroyo_dagster.sdf`; the Spark engine is in
`arroyo_dagster.spark.engine.dataflow`.
"""
