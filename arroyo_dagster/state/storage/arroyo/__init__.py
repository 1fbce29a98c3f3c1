"""What Arroyo's REST API and database say of jobs. They are only read, except to stop and start a
job.
"""
