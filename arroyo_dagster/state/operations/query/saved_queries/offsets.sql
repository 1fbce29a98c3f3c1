-- How far each partition of each source is read, how fast, and which stand still.
-- JOB
-- :epochs integer 10 Compare this many of the newest epochs.
-- :partition text null Only this partition, file, shard or subtask.
-- :high_water integer null The end of the partition, for its lag: state does not know where a source ends.
with steps as (
    select *,
        lag(state) over (partition by job, operator, "table", "partition" order by epoch) as state_before,
        first_value(position) over (partition by job, operator, "table", "partition" order by epoch) as first_position,
        first_value(finished_at) over (partition by job, operator, "table", "partition" order by epoch) as first_at,
        row_number() over (partition by job, operator, "table", "partition" order by epoch desc) as age
    from :history.offsets
), moved as (
    select job, operator, "table", "partition", count(*) as epochs,
        max(case when state <> state_before then finished_at end) as advanced_at
    from steps
    group by job, operator, "table", "partition"
), newest as (
    select steps.*, epochs, advanced_at,
        (cast(finished_at as bigint) - cast(first_at as bigint)) / cast(1000000 as double) as seconds
    from steps
    join moved on steps.job = moved.job and steps.operator = moved.operator
        and steps."table" = moved."table" and steps."partition" = moved."partition"
    where age = 1
)
select job, epoch, operator, "table", connector, "partition", position,
    case when seconds > 0 then (position - first_position) / seconds end as per_second,
    advanced_at,
    case
        when finished then 'finished'
        when epochs < 2 then 'one epoch only'
        when advanced_at is null then 'stands still'
        else 'advances'
    end as status,
    case when :high_water is not null and position is not null
        then greatest(cast(:high_water as bigint) - position, 0) end as lag,
    state
from newest
where :partition is null or "partition" = :partition
order by job, operator, "table", "partition"
