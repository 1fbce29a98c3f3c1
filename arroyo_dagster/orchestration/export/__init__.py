"""Exports of tables as assets, one for each export; it decides nothing about them."""
