"""Commands that change the state of stopped jobs. Decides nothing about state."""
