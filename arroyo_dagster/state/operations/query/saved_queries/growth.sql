-- How the tables of a job grow, with a forecast from 20 epochs or more, of an hour or more.
-- JOB
-- :epochs integer 400 Compare this many of the newest epochs.
-- :days number 30 Forecast the sizes after this many days.
-- :limit_bytes integer null The size that a table may reach, for the days that are left until then.
with points as (
    select *,
        (cast(finished_at as bigint) - max(cast(finished_at as bigint)) over (partition by job, operator, "table"))
            / cast(86400000000 as double) as day,
        cast(size_bytes as double) as size,
        row_number() over (partition by job, operator, "table" order by epoch desc) as age
    from :history.tables
), sums as (
    select job, operator, "table", count(*) as epochs,
        max(case when age = 1 then size_bytes end) as size_bytes,
        -min(day) as days, sum(day) as x, sum(size) as y, sum(day * size) as xy, sum(day * day) as xx
    from points
    group by job, operator, "table"
), slopes as (
    select *,
        case when epochs >= 20 and days >= 1 / cast(24 as double) and epochs * xx - x * x > 0 then round((epochs * xy - x * y) / (epochs * xx - x * x), 1) end
            as bytes_per_day
    from sums
)
select job, operator, "table", epochs, size_bytes, bytes_per_day,
    case when bytes_per_day is not null
        then cast(round(greatest(size_bytes + bytes_per_day * :days, 0)) as bigint) end
        as forecast_bytes,
    case when bytes_per_day > 0 and :limit_bytes is not null
        then greatest((cast(:limit_bytes as bigint) - size_bytes) / bytes_per_day, 0) end
        as days_left
from slopes
order by size_bytes desc, job, operator, "table"
