"""Read, check, link and write YAML definitions. Nothing here runs a service."""
