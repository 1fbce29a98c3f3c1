-- What gc deleted or moved to quarantine: when, who, under which plan.
-- [JOB]
-- :run text null Only of this run.
select job, at, owner, kind, plan, outcome, size_bytes, path, run
from :job.journal
where :run is null or run = :run
