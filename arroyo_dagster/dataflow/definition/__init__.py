"""Definitions in YAML: read, checked, linked and written back. Nothing here runs a service."""
