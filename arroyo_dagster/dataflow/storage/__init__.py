"""Store keyed states in the tables of the state package, and convert values at that boundary."""
