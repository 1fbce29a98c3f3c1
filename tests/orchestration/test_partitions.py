"""Partition keys: which there may be, and how they follow the jobs there are."""

from __future__ import annotations

import datetime as dt
from typing import Any
from urllib.parse import unquote
from xml.etree import ElementTree

import dagster as dg
import pytest

from arroyo_dagster.errors import InputError, ProtocolError
from arroyo_dagster.orchestration.partitions import (
    SyncPlan,
    job_of,
    jobs_partitions,
    key_error,
    plan_sync,
)
from arroyo_dagster.orchestration.rendering import (
    content,
    duration,
    size,
    sparkline,
    table,
    timestamp,
)
from arroyo_dagster.orchestration.schedules import DueOptions, build_due_schedule
from arroyo_dagster.orchestration.translator import DagsterArroyoTranslator, Naming
from arroyo_dagster.state.model.ids import JobId, PipelineId
from arroyo_dagster.state.model.layout import JobPaths
from arroyo_dagster.state.model.progress import Progress, progress_logger
from tests.fleets import Written, legacy_job, protocol_job

MANY = [f"p{at}/main" for at in range(100)]


def test_a_key_is_the_root_of_a_job_and_gives_it_back() -> None:
    for paths in (JobPaths(JobId("old")), JobPaths(JobId("main"), PipelineId("p"))):
        assert job_of(paths.root) == paths


@pytest.mark.parametrize("key", ["", "a...b", "a|b", "a\nb", "a\tb", "a/b/c", "../a", "/a", "a/"])
def test_what_is_no_key_is_refused_by_name(key: str) -> None:
    with pytest.raises(InputError, match="not the key of a job"):
        job_of(key)


def test_dots_and_blanks_in_a_name_are_fine() -> None:
    assert key_error("shop.prod/main job") is None


# ---- in step -------------------------------------------------------------------------------------


def test_keys_follow_the_jobs() -> None:
    assert plan_sync(["a", "b"], ["b", "c", "a|b"]) == SyncPlan(add=("c",), drop=("a",))
    assert plan_sync([], MANY).add == tuple(sorted(MANY))
    assert plan_sync(MANY[:5], []).drop == tuple(sorted(MANY[:5]))
    assert len(plan_sync(MANY, MANY[10:]).drop) == 10


@pytest.mark.parametrize("left", [0, 50, 89])
def test_too_many_keys_are_never_dropped_at_once(left: int) -> None:
    with pytest.raises(ProtocolError, match=f"{100 - left} of 100 partition keys"):
        plan_sync(MANY, MANY[:left])


def test_the_job_adds_and_drops_keys(deployed: Any) -> None:
    Written(deployed.store, protocol_job("p")).epochs(1)
    Written(deployed.store, legacy_job("old")).epochs(1)
    deployed.instance.add_dynamic_partitions("arroyo_jobs", ["gone", "old"])
    assert deployed.run("arroyo_sync_partitions").success
    assert deployed.keys == ["old", "p/main"]


def test_the_job_refuses_an_empty_listing(deployed: Any) -> None:
    Written(deployed.store, legacy_job("old"))
    deployed.store.put(protocol_job("p").current_generation, b"")
    deployed.instance.add_dynamic_partitions("arroyo_jobs", MANY)
    result = deployed.run("arroyo_sync_partitions")
    assert not result.success
    assert len(deployed.keys) == 100


# ---- due -----------------------------------------------------------------------------------------


def requests(deployed: Any, backlog: dict[str, int], **options: Any) -> Any:
    naming = Naming(DagsterArroyoTranslator(), jobs_partitions())
    schedule = build_due_schedule(
        "due",
        deployed.defs.resolve_job_def("arroyo_refresh"),
        "17 * * * *",
        naming=naming,
        backlog=lambda store: backlog,
        options=DueOptions(**options),
    )
    when = dt.datetime(2026, 1, 1, 5, 17, tzinfo=dt.UTC)
    with dg.build_schedule_context(
        instance=deployed.instance,
        scheduled_execution_time=when,
        repository_def=deployed.defs.get_repository_def(),
        resources={"arroyo_store": deployed.resource},
    ) as context:
        return schedule.evaluate_tick(context)


def test_the_largest_backlog_runs_first_and_no_more_than_asked_for(deployed: Any) -> None:
    deployed.instance.add_dynamic_partitions("arroyo_jobs", ["a", "b", "c", "d"])
    found = requests(deployed, {"a": 3, "b": 9, "c": 1, "d": 5}, min_backlog=2, most_runs=2)
    assert [one.run_key for one in found.run_requests] == ["b:20260101T0517", "d:20260101T0517"]
    assert found.run_requests[0].tags["arroyo/job_id"] == "b"
    assert found.run_requests[0].partition_key == "b"


def test_a_job_without_a_key_is_left_out_instead_of_failing_the_tick(deployed: Any) -> None:
    deployed.instance.add_dynamic_partitions("arroyo_jobs", ["a"])
    assert len(requests(deployed, {"a": 3, "new": 9}).run_requests) == 1
    found = requests(deployed, {"new": 9})
    assert not found.run_requests
    assert found.skip_message == "nothing due: 1 jobs, none with 1 or more"


# ---- shown ---------------------------------------------------------------------------------------


def test_tables_are_capped_and_never_begin_with_nothing() -> None:
    shown = table({"n": at, "none": None} for at in range(80))
    assert len(shown.records) == 50
    assert shown.records[0].data == {"n": 0, "none": "-"}
    assert table([]) is None


def test_progress_is_logged_every_ten_seconds_and_once_at_the_end() -> None:
    lines: list[str] = []
    now = 0.0
    log = progress_logger(lines.append, lambda: now)
    log(Progress(step="data", done=1, total=4, seconds=1.0))
    now = 10.0
    log(Progress(step="data", done=2, total=4, seconds=10.0))
    log(Progress(step="data", done=3, total=4, seconds=11.0))
    for _ in range(2):
        log(Progress(step="data", done=4, total=4, seconds=12.0))
    assert lines == ["data: 50%, 2 of 4 objects, 10 s left", "data: 100%, 4 of 4 objects, 0 s left"]


def test_a_curve_needs_two_points_and_shows_its_scale_and_last_value() -> None:
    assert sparkline([1.0]) is None
    assert sparkline([None, 1.0, None]) is None
    found = sparkline([3.0, 9_000.0, None, 5.0], "{:,.0f} B".format).value
    text, _, data = found.partition("](data:image/svg+xml,")
    assert text == "![5 B at last, 3 B to 9,000 B"
    svg = ElementTree.fromstring(unquote(data.removesuffix(")")))
    labels = [one.text for one in svg.iter() if one.tag.endswith("text")]
    assert labels == ["9,000 B", "3 B", "5 B"]
    assert svg[2].attrib["d"] == "M72,50l130,-40,130,40"


def test_a_curve_is_short_enough_to_be_seen_without_a_click() -> None:
    values = [1e12 + 7e11 * ((at * 37) % 120) for at in range(120)]
    found = sparkline(values, lambda count: f"{count / 1e12:.1f} TB").value
    assert len(found) < 1000  # more is hidden behind "Show Markdown"
    assert "84.3 TB" in found
    assert not {" ", "(", ")"} & set(found.split("](")[1][:-1])


def test_figures_have_units_and_separators() -> None:
    sizes = [size(count) for count in (0, 1, 999, 1000, 1_234_567_890)]
    assert sizes[:4] == ["0 bytes", "1 byte", "999 bytes", "1.0 kB (1,000 bytes)"]
    assert sizes[4] == "1.2 GB (1,234,567,890 bytes)"
    times = [duration(one) for one in (None, 0, 500, 90_000, 5.4e9)]
    assert times == [None, "0 ms", "500 µs", "90 ms", "1.5 h"]
    assert content(1000, 1, 2345) == "1.0 kB (1,000 bytes) in 1 file, 2,345 rows"
    assert content(None, None, None) is None


def test_times_that_no_calendar_has_are_text() -> None:
    assert timestamp(None) is None
    assert timestamp(1_000_000).value == 1.0
    assert timestamp(2**64 - 1) == f"{2**64 - 1} µs since 1970"
