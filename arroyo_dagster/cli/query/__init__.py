"""Commands that query state. They change none, and write only where they are told to."""
