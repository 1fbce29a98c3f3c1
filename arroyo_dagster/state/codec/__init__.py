"""Bytes to values and back: metadata, records, Parquet, bincode and hashes. Nothing is read from a
store here.
"""
