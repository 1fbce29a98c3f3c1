"""How keyed states are stored in the tables of the state package, and how values cross that
boundary.
"""
