"""Health checks: rules about one job's epochs, tables and storage, without any I/O."""
