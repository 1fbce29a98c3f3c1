"""The tables of Arroyo's built-in operators and connectors: their entries as named fields."""
