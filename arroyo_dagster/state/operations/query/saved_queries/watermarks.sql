-- How far event time has advanced at each operator, how far it is behind, and how fast it goes.
-- JOB
-- :epochs integer 10 Compare this many of the newest epochs.
with ends as (
    select *,
        first_value(watermark) over (partition by job, operator order by epoch) as first_watermark,
        first_value(finished_at) over (partition by job, operator order by epoch) as first_at,
        row_number() over (partition by job, operator order by epoch desc) as age
    from :history.watermarks
    where watermark is not null
), rates as (
    select job, operator,
        (cast(watermark as bigint) - cast(first_watermark as bigint))
            / cast(cast(finished_at as bigint) - cast(first_at as bigint) as double) as rate
    from ends
    where age = 1 and finished_at > first_at
), newest as (
    select *, max(epoch) over (partition by job) as newest_epoch
    from :history.watermarks
)
select newest.job as job, epoch, newest.operator as operator, watermark, lag_seconds,
    (cast(max_watermark as bigint) - cast(watermark as bigint)) / cast(1000000 as double) as ahead_seconds,
    rate
from newest
left join rates on newest.job = rates.job and newest.operator = rates.operator
where epoch = newest_epoch
order by job, operator
