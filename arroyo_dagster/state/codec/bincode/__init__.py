"""Bincode as Arroyo writes it: values and columns to bytes and back. No table is known here."""
