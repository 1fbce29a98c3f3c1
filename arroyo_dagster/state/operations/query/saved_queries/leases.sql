-- Who holds the leases on a job, or on all jobs: the newest lease of each kind.
-- [JOB]
select job, kind, token, state, owner, description, renewed_at, age_seconds, expires_in_seconds, problem
from :job.leases
order by job, kind
