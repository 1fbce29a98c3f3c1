"""An evolve of jobs with like windows, with the graphs of both pipelines from Arroyo's API: only
windows in equal places match by themselves; for others the place decides what is suggested.
An evolve that would have to guess is refused, and prints the override that decides it."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from click.testing import CliRunner, Result

from arroyo_dagster import (
    Layout,
    MemoryStore,
    ParquetBackend,
    WriteProtected,
    cli,
    configure,
    find_job,
    timestamp_table_config,
)
from arroyo_dagster.errors import InputError
from arroyo_dagster.state.planning.surgery.places import operator_number
from tests.arroyo_jobs import EVENTS, SECOND, stopped, table_rows
from tests.evolved_jobs import COUNT, KEY, MOST, SUGGESTED, Column, Sql, loaded, sql_job
from tests.formats import EditPlan
from tests.internals import (
    EditOptions,
    JobDirectory,
    open_directory,
    parse_overrides,
    plan_evolve,
    run_evolve,
)
from tests.jobs import listing
from tests.journeys.test_evolve import taken, two_windows
from tests.loopback import Reply, serving
from tests.programs import Operator, program_database, sliding
from tests.surgery_jobs import BEGAN, NANOS, WATERMARK, SurgeryJob

pytestmark = pytest.mark.usefixtures("one_at_a_time")

SOURCE = "source_orders_40"
VIEWS = {f"view{at}": f"value_{at}" for at in (104, 114, 107, 117, 119)}
PARTS = {"tumbling": "TumblingWindow<w>", "join": "join", "watermark": "watermark"}
Jobs = tuple[SurgeryJob, SurgeryJob]


def graph_of(job: SurgeryJob, views: Mapping[str, str]) -> dict[str, Any]:
    """The pipeline of a job as a REST answer has it.

    Args:
        views: by operator the view that it reads; a sink with the next number comes after it, and
            every other operator directly after the source.
    """
    names = [str(one.operator) for one in ParquetBackend(job.store, job.paths).load().operators]
    numbers = {name: operator_number(name)[1] or (90 if "<" in name else 0) for name in names}
    called = {f"value_{100 + numbers[name]}": view for name, view in views.items()}
    nodes, edges = [], []
    for name, number in numbers.items():
        kind, _ = operator_number(name)
        part = "session_window_90" if number == 90 else PARTS.get(kind, kind)
        nodes.append({"node_id": number, "description": called.get(name, part)})
        before = numbers[SOURCE]
        if name in views:
            before = 100 + number
        elif number - 1 in [numbers[one] for one in views]:
            before = number - 1
        if not kind.startswith("source"):
            edges.append({"src_id": before, "dest_id": number, "edge_type": "Forward"})
    return {"id": f"pl_{job.job}", "graph": {"nodes": nodes, "edges": edges}}


WAS = {"tumbling_4": "paid", "tumbling_14": "open"}
NOW = {"tumbling_7": "open", "tumbling_17": "paid"}
SINKS = {"tumbling_4": "sink_y_5", "tumbling_14": "sink_x_15"}


def jobs_of(now: Mapping[str, str], sinks: Mapping[str, str] = {}) -> Jobs:
    """A with windows of the views `paid` before sink x and `open` before sink y; B with others."""
    new = {name: f"sink_new_{(operator_number(name)[1] or 0) + 1}" for name in now}
    pairs = [(name, sinks.get(name, new[name])) for name in now]
    source, job, _ = two_windows(pairs, source=SOURCE, **VIEWS)
    return source, job


@contextlib.contextmanager
def api(jobs: Jobs, graphs: Sequence[dict[str, Any]]) -> Iterator[JobDirectory]:
    """Arroyo's API of the pipelines of both jobs, with such graphs."""
    pipelines = [
        {**graph, "id": f"pl_{one.job}", "name": "p", "stop": "none", "created_at": 1}
        for graph, one in zip(graphs, jobs, strict=True)
    ]
    listed = [
        {"id": one.job, "pipeline_id": f"pl_{one.job}", "state": "Stopped", "run_id": 1}
        for one in jobs
    ]
    answers = {f"/api/v1/pipelines/{one['id']}": one for one in pipelines}

    def answer(path: str, query: dict[str, str]) -> Reply:
        if path == "/api/v1/jobs":
            return Reply(body={"data": listed})
        if path == "/api/v1/pipelines":
            return Reply(body={"data": pipelines, "hasMore": False})
        if path.endswith("/checkpoints"):
            return Reply(body={"data": []})
        return Reply(body=answers[path])

    with serving(answer) as server:
        yield open_directory(api=server.url)


def plan(jobs: Jobs, directory: JobDirectory | None = None, overrides: Any = None) -> EditPlan:
    source, job = jobs
    at = directory or stopped(job.paths)
    chosen = parse_overrides(overrides)
    return plan_evolve(taken(source), WriteProtected(job.store), job.paths, at, chosen)


def suggested(jobs: Jobs, now: Mapping[str, str]) -> tuple[dict[str, str], str]:
    """The pairs that a refusal suggests if the graphs are known, and its text."""
    source, job = jobs
    with (
        api(jobs, [graph_of(source, WAS), graph_of(job, now)]) as directory,
        pytest.raises(InputError, match="do not match for certain") as refused,
    ):
        plan(jobs, directory)
    pairs = SUGGESTED.search(refused.value.next_step or "")
    assert pairs is not None
    return json.loads(pairs[1]), str(refused.value)


def test_like_windows_in_equal_places_match_by_themselves() -> None:
    now = {"tumbling_4": "open", "tumbling_14": "paid"}
    source, job = jobs = jobs_of(now, SINKS)
    with pytest.raises(InputError, match="do not match for certain") as refused:
        plan(jobs)
    assert "pass --arroyo-api or --arroyo-db" in str(refused.value)
    with api(jobs, [graph_of(source, WAS), graph_of(job, now)]) as directory:
        found = plan(jobs, directory)
    pairs = {str(one.operator): str(one.source) for one in found.matches}
    assert (pairs["tumbling_4"], pairs["tumbling_14"]) == ("tumbling_14", "tumbling_4")
    assert not [one for one in found.unknown if "graphs" in one]
    (evidence,) = (one.evidence for one in found.preconditions if "graphs" in one.name)
    assert "pipeline pl_job_a at" in evidence


def test_like_windows_with_other_targets_are_suggested_by_their_views() -> None:
    source, job = jobs = jobs_of(NOW)
    pairs, text = suggested(jobs, NOW)
    assert {"tumbling_14": "tumbling_7", "tumbling_4": "tumbling_17"}.items() <= pairs.items()
    assert "nothing shows which takes which" not in text
    was = loaded(source.store, source.paths)
    options = EditOptions(quiet_seconds=0)
    chosen = parse_overrides({"map": pairs})
    with api(jobs, [graph_of(source, WAS), graph_of(job, NOW)]) as directory:
        run_evolve(taken(source), job.store, job.paths, directory, chosen, options)
    found = loaded(job.store, job.paths)
    assert found["tumbling_7", "t"] == was["tumbling_14", "t"]
    assert found["tumbling_17", "t"] == was["tumbling_4", "t"]


LINE = re.compile(r"`((?:rename|fill|accumulators|map): [^`]*)`")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[MemoryStore]:
    yield MemoryStore(f"guesses-{tmp_path.name}")
    configure(None)


def evolve(store: MemoryStore, *more: str) -> Result:
    words = ["evolve", "job_a", "job_b", "--assume", "job_b=stopped", "--url", store.url, *more]
    return CliRunner().invoke(cli.main, words)


def of_view(view: str) -> Sql:
    def column(name: str, kind: pa.DataType) -> Column:
        return name.format(view=view), kind, True

    return Sql(
        key=(f"{view}.k", KEY[1], True),
        window=(COUNT, column("sum({view}.v)[sum]", pa.int64())),
        totals=(COUNT, column("max({view}.v)[value]", pa.int64())),
    )


def decided(store: MemoryStore, file: Path, most: int) -> Result:
    """Evolve with the first override that each refusal prints, until nothing is refused."""
    lines: dict[str, list[str]] = {}
    file.write_text("{}")
    for _ in range(most):
        found = evolve(store, "--overrides", str(file))
        if found.exit_code == 0:
            return found
        name, _, value = LINE.findall(" ".join(found.stderr.split()))[0].partition(": ")
        lines.setdefault(name, []).append(value[1:-1])
        merged = {name: _merged(values) for name, values in lines.items()}
        file.write_text("\n".join(f"{name}: {value}" for name, value in merged.items()))
    return found


def _merged(values: list[str]) -> str:
    whole: dict[str, Any] = {}
    for one in values:
        for operator, value in json.loads(f"{{{one}}}").items():
            whole[operator] = (
                value if isinstance(value, str) else {**whole.get(operator, {}), **value}
            )
    return json.dumps(whole)


def test_a_renamed_view_keeps_its_state_with_the_overrides_that_are_printed(
    store: MemoryStore, tmp_path: Path
) -> None:
    sql_job(Layout.LEGACY, "job_a", of_view("pv"), store=store)
    sql_job(Layout.LEGACY, "job_b", of_view("renamed"), base=7, epochs=2, store=store)
    was = listing(store)
    refused = evolve(store, "--yes")
    assert (refused.exit_code, listing(store)) == (1, was)
    found = decided(store, tmp_path / "changes.yaml", 13)
    assert found.exit_code == 0, found.stderr
    assert "filled" not in found.stdout
    text = (tmp_path / "changes.yaml").read_text()
    assert '"sum(renamed.v)[sum]": "sum(pv.v)[sum]"' in text
    assert '"renamed.k": "pv.k"' in text


def test_a_renamed_column_alone_is_neither_filled_nor_dropped(
    store: MemoryStore, tmp_path: Path
) -> None:
    other = ("sum(renamed.v)[sum]", pa.int64(), True)
    sql_job(
        Layout.LEGACY,
        "job_a",
        Sql(window=(COUNT, ("sum(pv.v)[sum]", pa.int64(), True))),
        store=store,
    )
    sql_job(Layout.LEGACY, "job_b", Sql(window=(COUNT, other)), base=7, store=store)
    suggested = evolve(store)
    assert (suggested.exit_code, "--map tumbling_4=tumbling_4 (in" in suggested.stderr) == (1, True)
    pair = ("--map", "tumbling_4=tumbling_4")
    refused = evolve(store, *pair)
    assert refused.exit_code == 1
    text = " ".join(refused.stderr.split())
    assert '`rename: {"tumbling_4": {"sum(renamed.v)[sum]": "sum(pv.v)[sum]"}}`' in text
    assert '`fill: {"tumbling_4": {"sum(renamed.v)[sum]": null}}`' in text
    file = tmp_path / "changes.yaml"
    file.write_text('fill: {"tumbling_4": {"sum(renamed.v)[sum]": null}}')
    assert "filled: sum(renamed.v)[sum]" in evolve(store, "--overrides", str(file), *pair).stdout


def programs(
    path: Path, store: MemoryStore, job_a: bytes, job_b: bytes, *, operator: str
) -> list[str]:
    """A database in which an operator of each job has such a program."""
    found: dict[str, list[Operator]] = {}
    for name, config in (("job_a", job_a), ("job_b", job_b)):
        epoch = ParquetBackend(store, find_job(store, name)).load()
        order = sorted(epoch.operators, key=lambda one: one.operator.startswith("sink_"))
        kind = "SlidingWindowAggregate" if operator.startswith("sliding") else "Any"
        found[name] = [
            (str(one.operator), kind, config) if one.operator == operator else (one.operator, "Any")
            for one in order
        ]
    return ["--arroyo-db", program_database(path, found)]


def test_distinct_aggregates_are_not_matched_by_their_order(
    store: MemoryStore, tmp_path: Path
) -> None:
    sql = Sql(totals=(COUNT, MOST), distinct=(1, 2))
    sql_job(Layout.LEGACY, "job_a", sql, store=store)
    sql_job(Layout.LEGACY, "job_b", sql, base=7, store=store)
    refused = evolve(store)
    assert (refused.exit_code, "which of its aggregates" in refused.stderr) == (1, True)
    assert decided(store, tmp_path / "changes.yaml", 2).exit_code == 0
    assert '{"updating_aggregate_7": {"1": 1, "2": 2}}' in (tmp_path / "changes.yaml").read_text()
    where = {"operator": "updating_aggregate_7"}
    swapped = programs(tmp_path / "other.sqlite", store, b"a, b", b"b, a", **where)
    assert "which of its aggregates" in evolve(store, *swapped).stderr
    same = programs(tmp_path / "same.sqlite", store, b"a, b", b"a, b", **where)
    shown = evolve(store, *same)
    assert shown.exit_code == 0, shown.stderr
    assert "which columns its aggregates take" not in shown.stdout


@pytest.mark.parametrize(("slide", "code"), [(10, 0), (20, 1)])
def test_a_window_with_another_slide_is_refused(
    store: MemoryStore, tmp_path: Path, slide: int, code: int
) -> None:
    config = timestamp_table_config(
        "t", "Sliding_intermediate", keys=["k"], retention_micros=40 * SECOND, schema=EVENTS
    )
    for name in ("job_a", "job_b"):
        job = SurgeryJob(
            Layout.LEGACY, parallelism=1, store=store, watermark_micros=WATERMARK, job=name
        )
        rows = table_rows(EVENTS, [["k1"], [1], [BEGAN * 1000 + 40 * NANOS]])
        job.write({("sliding_window_4", config): rows})
    same, other = sliding("hop", 40, 10), sliding("hop", 40, slide)
    where = programs(tmp_path / "db.sqlite", store, same, other, operator="sliding_window_4")
    found = evolve(store, *where)
    assert found.exit_code == code, found.output
    assert "slide" not in found.stdout
    if code:
        assert "its windows slide by 20 s, and in the source by 10 s" in found.stderr
