"""Commands that query state: `sql`, `get`, `diff`, `offsets`, `watermarks`. They change none."""
