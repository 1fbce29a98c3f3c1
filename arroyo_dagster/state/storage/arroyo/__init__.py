"""The jobs in Arroyo's REST API and database. All access is read-only, except to stop and start a
job.
"""
