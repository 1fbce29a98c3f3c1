-- How the rows of a table are spread over the subtasks, with the largest key of each.
-- JOB
-- :operator name required The operator of the table.
-- :table name required The table: an expiring one, whose rows are routed by key. All of its rows are read.
-- :parallelism integer null The number of subtasks. Default: of the operator now.
with counted as (
    select _subtask as subtask, _key_hash as key_hash, count(*) as key_rows
    from :job.:operator.:table
    group by _subtask, _key_hash
), ranked as (
    select *, row_number() over (partition by subtask order by -cast(key_rows as bigint), key_hash) as place
    from counted
), spread as (
    select subtask, sum(key_rows) as rows, count(*) as keys, max(key_rows) as largest_key_rows,
        max(case when place = 1 then key_hash end) as largest_key_hash
    from ranked
    group by subtask
)
select subtask, rows, round(cast(rows as double) * 100 / sum(rows) over (), 1) as percent, keys,
    largest_key_rows, largest_key_hash
from spread
order by rows desc, subtask
