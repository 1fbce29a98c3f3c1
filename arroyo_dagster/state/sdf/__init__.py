"""SDF keyed states: declared in YAML, changed by one service, read by others.

Import from the modules: `reading` (text to definitions), `definition` (what was declared),
`dumping`, `windows`.
"""
