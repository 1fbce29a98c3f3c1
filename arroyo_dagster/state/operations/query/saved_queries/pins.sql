-- The pinned epochs of a job, or of all jobs.
-- [JOB]
select job, epoch, pinned_at, owner, reason
from :job.pins
where not released
order by job, epoch
