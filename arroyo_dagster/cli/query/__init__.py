"""Commands that query state: `sql`, `get`, `diff`. They write only files they are told to."""
