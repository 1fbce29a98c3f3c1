"""Run the services of a dataflow as operators: steps, windows and state handles. Reads no YAML."""
