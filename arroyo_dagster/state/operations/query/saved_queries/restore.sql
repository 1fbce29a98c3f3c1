-- What each subtask reads in a restore, how long it takes and how much memory it needs; the slowest first.
-- JOB
-- :parallelism integer null Of the restored job. Default: of each operator now.
-- :start_seconds number 5 Until a worker begins to read: scheduling, compilation, metadata.
select job, epoch, subtask, sum(files) as files, sum(size_bytes) as size_bytes, sum(rows) as rows,
    sum(memory_bytes) as memory_bytes, round(sum(seconds) + :start_seconds, 3) as seconds
from :job.key_ranges
group by job, epoch, subtask
order by seconds desc, subtask
