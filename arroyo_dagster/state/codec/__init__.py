"""Bytes to values and back: metadata, records, Parquet, bincode and hashes. It does not access
stores.
"""
