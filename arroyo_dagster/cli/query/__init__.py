"""Commands that query state: `sql`, `get`. They write only the files they are told to."""
