"""Where the records of topics come from and go to: files, clocks, pipes, and other services.

Import from the modules: `bindings` says what a topic is bound to, `files`, `rate`, `pipe` and
`segments` are sources, `sinks` the way out.
"""
