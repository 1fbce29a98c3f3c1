"""Tests of packages and dataflows: rows given, rows expected, run in process. Not used by running
services.
"""
