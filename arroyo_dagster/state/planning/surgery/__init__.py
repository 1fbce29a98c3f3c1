"""How the operators and columns of two jobs match: pure decisions, without rows."""
