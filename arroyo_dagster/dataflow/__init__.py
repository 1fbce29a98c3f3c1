"""SDF keyed states: definitions in YAML, the services that build them, and the views that read
them; on one process.

What users of dataflows import is in `arroyo_dagster.sdf`; Spark is in
`arroyo_dagster.spark.dataflow`.
"""
