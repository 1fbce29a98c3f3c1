"""The component's fields in YAML: their texts, schema, errors and scaffolding. The component itself
is in `orchestration.component`.
"""
