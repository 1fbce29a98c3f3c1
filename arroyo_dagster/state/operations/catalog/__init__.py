"""Listing of jobs and epochs, their changes, and the catalogue of epochs and jobs."""
