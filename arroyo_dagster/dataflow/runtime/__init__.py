"""The services of a dataflow as operators: steps, windows and state handles. It reads no YAML."""
