"""Exports of tables to Parquet, Delta and Iceberg, each epoch once. No state is written."""
