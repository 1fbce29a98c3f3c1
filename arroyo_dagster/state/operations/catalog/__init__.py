"""Listing of jobs and epochs, their changes, and the health of jobs."""
