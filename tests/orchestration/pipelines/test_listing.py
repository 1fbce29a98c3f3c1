"""The list of pipelines: what a listing may change, and what an outage may not."""

from __future__ import annotations

import contextlib
import itertools
import json
import shutil
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pytest

from arroyo_dagster.errors import StorageError
from arroyo_dagster.orchestration import PipelineList
from arroyo_dagster.orchestration.pipelines.lineage import without_cycles
from arroyo_dagster.orchestration.pipelines.listing import list_pipelines
from arroyo_dagster.state import Layout, MemoryStore, ObjectStore, open_store
from tests.compat.arroyo import DATA, unpack
from tests.denied import ALL, Denied
from tests.faulty_stores import Before
from tests.fleets import Written, legacy_job, protocol_job
from tests.internals import open_directory
from tests.jobs import written_by_word_job
from tests.loopback import Reply, recorded, replaying, serving
from tests.stories import run_story, write_story

T = TypeVar("T")
_NUMBERS = itertools.count()


def listed(store: ObjectStore, last: PipelineList | None = None, **more: Any) -> PipelineList:
    sources = {name: more.pop(name, None) for name in ("api", "database", "assumed")}
    directory = open_directory(**sources)
    more.setdefault("url", "memory://m")
    return list_pipelines(store, directory, last, now_micros=more.pop("now", 7), **more)


def jobs_of(*names: str, store: MemoryStore | None = None) -> MemoryStore:
    store = store or MemoryStore(f"m-{next(_NUMBERS)}")
    for name in names:
        pipeline, _, job = name.rpartition("/")
        paths = protocol_job(pipeline, job) if pipeline else legacy_job(job)
        Written(store, paths, files=False).epochs(2)
    return store


def keys_of(pipelines: PipelineList) -> list[str]:
    return ["/".join(pipeline.key) for pipeline in pipelines.pipelines]


def arroyo(**names: str) -> Callable[[str, dict[str, str]], Reply]:
    """A server with one job of each pipeline: their names by id."""
    jobs = [
        {"id": pipeline.replace("pl", "job"), "pipeline_id": pipeline, "state": "Running"}
        for pipeline in names
    ]
    pages = [
        {"id": pipeline, "name": name, "query": f"-- {name}", "created_at": at}
        for at, (pipeline, name) in enumerate(names.items())
    ]

    def answer(path: str, query: dict[str, str]) -> Reply:
        if path == "/api/v1/jobs":
            return Reply(body={"data": jobs})
        if path == "/api/v1/pipelines":
            return Reply(body={"data": pages, "hasMore": False})
        return Reply(404, {"error": "Pipeline not found"})

    return answer


# ---- what is listed ------------------------------------------------------------------------------


def test_the_package_loads_without_dagster_and_arrow() -> None:
    modules = ("cache", "lineage", "listing", "model")
    code = "import sys; " + "; ".join(
        f"import arroyo_dagster.orchestration.pipelines.{name}" for name in modules
    )
    code += "; print(*{'dagster', 'pyarrow', 'polars', 'numpy', 'google'} & set(sys.modules))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == ""


def test_what_a_real_arroyo_wrote_is_listed_by_its_names(tmp_path: Path) -> None:
    store = open_store(unpack("leader", tmp_path))
    with serving(replaying("leader-stopped")) as server:
        found = listed(store, api=server.url)
        assert len(server.paths) == 2  # the jobs, and one page of pipelines
    assert keys_of(found) == ["auctions", "joins", "sessions", "tumble"]
    assert found.by_root["pl_4BjSq2rVmU/job_U5O5jKZxJg"] == found.pipelines[-1]
    tumble = found.pipelines[-1]
    assert (tumble.name, tumble.current_name, tumble.managed) == ("tumble", "tumble", False)
    assert tumble.sql == recorded("leader-stopped")["/api/v1/pipelines/pl_4BjSq2rVmU"]["query"]
    assert tumble.paths == protocol_job("pl_4BjSq2rVmU", "job_U5O5jKZxJg")
    assert [end.key for end in tumble.sources] == [("impulse", "tumble", "impulse")]
    assert [end.key for end in tumble.sinks] == [("filesystem", "data", "leader", "out", "tumble")]
    assert (found.problem, found.missing, found.notes) == (None, (), ())
    assert PipelineList.from_json(found.to_json()) == found
    # Without the server the next time, all of it stays.
    again = listed(store, found, now=8)
    assert replace(again, listed_at_micros=7) == found


def test_sql_that_is_known_later_names_sources_and_sinks_anew(tmp_path: Path) -> None:
    store = open_store(unpack("legacy", tmp_path))
    first = listed(store)
    with serving(replaying("legacy-stopped")) as server:
        found = listed(store, first, api=server.url)
    assert keys_of(found) == keys_of(first)
    tumble = found.by_root["job_mSLGII6lDN"]
    assert (tumble.name, tumble.current_name) == (None, "tumble")
    assert tumble.sources == first.by_root[tumble.root].sources
    assert [end.key for end in tumble.sinks] == [("filesystem", "data", "legacy", "out", "tumble")]


@pytest.mark.parametrize(("archive", "sink"), [("flights", "result"), ("legacy", "out_t")])
def test_without_arroyo_the_state_tells_sources_and_sinks(
    archive: str, sink: str, tmp_path: Path
) -> None:
    found = listed(open_store(unpack(archive, tmp_path)))
    assert all(pipeline.key == (pipeline.root,) for pipeline in found.pipelines)
    last = found.pipelines[-1]
    assert last.sources[0].key[1:] == (last.root, last.sources[0].operator.split("_")[1])
    assert last.sinks[0].key[1:] == (last.root, sink)
    lineage = without_cycles(found.pipelines)
    assert {len(writers) for writers in lineage.sinks.values()} == {1}


def test_a_managed_job_has_sources_and_sinks_too() -> None:
    found = listed(written_by_word_job())
    (pipeline,) = found.pipelines
    assert pipeline.managed is True
    assert (len(pipeline.sources), len(pipeline.sinks)) == (1, 1)
    assert pipeline.sources[0].key[:-1] == ("table", *pipeline.key)


def test_services_of_a_dataflow_are_connected_by_its_topics(tmp_path: Path) -> None:
    store = jobs_of()
    write_story(tmp_path, 8, seed=1)
    run_story(store, tmp_path, rows_per_epoch=8)
    lineage = without_cycles(listed(store).pipelines)
    words = ("topic", "tests--2estory", "words")
    assert lineage.sinks[words] == ("tests.story/split",)
    assert [root for root, keys in lineage.sources.items() if words in keys] == [
        *("tests.story/count", "tests.story/follow", "tests.story/gather")
    ]


def test_layouts_are_told_apart_and_filtered() -> None:
    store = jobs_of("a", "b/main")
    both = listed(store)
    assert keys_of(both) == ["a", "b/main"]
    legacy = listed(store, both, layout=Layout.LEGACY)
    assert (keys_of(legacy), legacy.missing) == (["a"], ())
    assert listed(store, legacy).pipelines == both.pipelines


# ---- names ---------------------------------------------------------------------------------------


def test_a_name_makes_the_key_once_and_a_rename_changes_only_the_current_name() -> None:
    store = jobs_of("pl_1/job_1", "pl_2/job_2", "job_3")
    with serving(arroyo(pl_1="Orders, täglich", pl_2="orders")) as server:
        first = listed(store, api=server.url)
    assert keys_of(first) == ["Orders--2c--20t--e4glich", "job_3", "orders"]
    with serving(arroyo(pl_1="orders", pl_2="x", pl_3="late")) as server:
        second = listed(store, first, api=server.url)
    assert keys_of(second) == keys_of(first)
    assert second.by_root["pl_1/job_1"].name == "Orders, täglich"
    assert second.by_root["pl_1/job_1"].current_name == "orders"
    # A pipeline that was first listed without a name keeps the key of its root.
    late = second.by_root["job_3"]
    assert (late.key, late.name, late.current_name) == (("job_3",), None, "late")


@pytest.mark.parametrize(
    "reply", [Reply(503), Reply(401), Reply(body={"data": 1}), Reply(body=b"<html>")]
)
def test_an_api_that_does_not_answer_changes_no_key(reply: Reply) -> None:
    store = jobs_of("pl_1/job_1")
    with serving(arroyo(pl_1="orders")) as server:
        first = listed(store, api=server.url)
    jobs_of("pl_2/job_2", store=store)
    with serving(lambda path, query: reply) as server:
        second = listed(store, first, api=server.url)
    assert keys_of(second) == ["orders", "pl_2/job_2"]
    assert second.by_root["pl_1/job_1"] == first.pipelines[0]
    assert "names of pipelines are not known" in second.notes[0]


def test_a_second_pipeline_of_a_name_gets_the_id_of_its_job() -> None:
    store = jobs_of("pl_1/job_1")
    with serving(arroyo(pl_1="orders", pl_2="orders", pl_3="job_4")) as server:
        first = listed(store, api=server.url)
        jobs_of("pl_0/job_0", "pl_2/job_2", "pl_3/job_3", "job_4", store=store)
        found = listed(store, first, api=server.url)
    assert found.keys["pl_1/job_1"] == ("orders",)
    assert found.keys["pl_2/job_2"] == ("orders---job_2",)
    assert found.keys["job_4"] == ("job_4",)
    assert found.keys["pl_3/job_3"] == ("job_4---job_3",)
    assert found.by_root["pl_3/job_3"].name == "job_4"


def test_names_of_every_kind_are_listed_together() -> None:
    names = ["a-b", "a_b", "a.b", "a b", "a/b", "ü" * 255, "%2e", "~", "\n", "..", "A-B", "'\"\\"]
    store = jobs_of(*(f"pl_{at}/job_{at}" for at in range(len(names))))
    with serving(arroyo(**{f"pl_{at}": name for at, name in enumerate(names)})) as server:
        found = listed(store, api=server.url)
    assert {pipeline.name for pipeline in found.pipelines} == {*names}
    assert all(len(pipeline.key) == 1 for pipeline in found.pipelines)


# ---- what does not change the list ---------------------------------------------------------------


def failing(*paths: str) -> Callable[[str, str], None]:
    def fail(verb: str, path: str) -> None:
        if path in paths:
            raise StorageError("the network is down", path=path)

    return fail


@pytest.mark.parametrize(
    ("fail", "problem", "seconds"),
    [
        (failing(""), "the listing failed: the network is down", 20),
        (failing("b/main"), "1 directories could not be listed, the first: the network", 20),
        (lambda verb, path: time.sleep(0.3), "not done in time", 0.2),
    ],
)
def test_a_listing_that_fails_or_is_cut_short_changes_nothing(
    fail: Callable[[str, str], None], problem: str, seconds: float
) -> None:
    store = jobs_of("a", "b/main")
    first = listed(store)
    jobs_of("c", store=store)
    found = listed(Before(store, fail), first, within_seconds=seconds, gone=["a"])
    assert problem in (found.problem or "")
    assert replace(found, problem=None) == first
    empty = listed(Before(store, fail), None, within_seconds=seconds)
    assert (empty.pipelines, bool(empty.problem)) == ((), True)
    later = listed(store, found)
    assert (keys_of(later), later.problem) == (["a", "b/main", "c"], None)


def test_an_empty_listing_changes_nothing_where_the_last_was_not_empty(tmp_path: Path) -> None:
    empty = open_store(tmp_path.as_uri())
    first = listed(jobs_of("a", "b/main"))
    found = listed(empty, first)
    assert found.problem == "the listing shows no pipeline, and the last one showed 2"
    assert replace(found, problem=None) == first
    gone = listed(empty, first, gone=["a", "b/main"])
    assert (gone.pipelines, gone.problem, gone.keys) == ((), None, first.keys)
    assert listed(empty).problem is None


def test_a_directory_that_may_not_be_read_hides_its_jobs_only() -> None:
    store = jobs_of("a", "b/main")
    first = listed(store)
    jobs_of("c", store=store)
    found = listed(Denied(store, "b", ALL), first)
    assert (keys_of(found), found.missing) == (["a", "b/main", "c"], ("b/main",))
    assert "b cannot be listed: permission denied" in found.notes[0]


def test_a_list_of_another_url_gives_its_keys_only() -> None:
    first = listed(jobs_of("a", "b/main"))
    found = listed(jobs_of("a", store=jobs_of()), first, url="memory://other")
    assert (keys_of(found), found.missing, found.keys) == (["a"], (), first.keys)


# ---- what leaves the list ------------------------------------------------------------------------


def test_a_pipeline_leaves_when_its_own_server_says_that_it_was_deleted() -> None:
    store = jobs_of("pl_1/job_1", "pl_2/job_2", "pl_3/main")
    with serving(arroyo(pl_1="orders", pl_2="other")) as server:
        first = listed(store, api=server.url)
        for root in ("pl_1/job_1", "pl_3/main"):
            store.delete_many([info.path for info in store.list(root)])
        assert listed(store, first, api=server.url).missing == ("pl_1/job_1", "pl_3/main")
    # Another cluster's server knows none of this URL's jobs; a server that is away says nothing.
    with serving(arroyo(pl_9="stranger")) as server:
        assert len(listed(store, first, api=server.url).missing) == 2
    with serving(lambda path, query: Reply(503)) as server:
        assert len(listed(store, first, api=server.url).missing) == 2
    with serving(arroyo(pl_2="other")) as server:
        found = listed(store, first, api=server.url)
        # pl_3 was never named by a server: it may be of another cluster.
        assert found.missing == ("pl_3/main",)
        # Its key is never given to another.
        with serving(arroyo(pl_2="other", pl_4="orders")) as later:
            jobs_of("pl_4/job_4", store=store)
            found = listed(store, found, api=later.url)
    assert keys_of(found) == ["orders---job_4", "other", "pl_3/main"]
    assert listed(store, found, assumed={"pl_3/main": "gone"}).missing == ()


def test_the_database_proves_a_deletion_in_the_legacy_layout(tmp_path: Path) -> None:
    root = tmp_path / "state"
    root.mkdir()
    store = open_store(unpack("legacy", root))
    database = str(shutil.copy(DATA / "state-legacy.sqlite", tmp_path / "db.sqlite"))
    first = listed(store, database=database)
    assert keys_of(first) == ["auctions", "joins", "sessions", "tumble"]
    shutil.rmtree(root / "job_d14OMmRXhf")
    assert listed(store, first, database=database).missing == ("job_d14OMmRXhf",)
    with contextlib.closing(sqlite3.connect(database)) as connection, connection:
        connection.execute("DELETE FROM job_configs WHERE id = 'job_d14OMmRXhf'")
    found = listed(store, first, database=database)
    assert (keys_of(found), found.missing) == (["auctions", "sessions", "tumble"], ())


def test_what_the_user_calls_gone_leaves() -> None:
    store = jobs_of("pl_1/job_1", "pl_2/job_2", "c")
    with serving(arroyo(pl_1="orders", pl_2="orders")) as server:
        first = listed(store, api=server.url)
    store.delete_many([info.path for info in store.list("pl_1/job_1")])
    found = listed(store, first, gone=["orders", "c"])
    # A name takes away what is missing, a root also what is there.
    assert keys_of(found) == ["orders---job_2"]
    assert (found.missing, found.keys) == ((), first.keys)


# ---- the metadata --------------------------------------------------------------------------------


def test_sources_and_sinks_stay_if_the_state_cannot_be_read(tmp_path: Path) -> None:
    store = open_store(unpack("flights", tmp_path))
    first = listed(store)
    before = {
        pipeline.root: replace(pipeline, epoch=7) if number else pipeline
        for number, pipeline in enumerate(first.pipelines)
    }
    first = replace(first, pipelines=tuple(before.values()))

    def fail(verb: str, path: str) -> None:
        if verb == "read":
            raise StorageError("the network is down", path=path)

    found = listed(Before(store, fail), first)
    assert found.pipelines == first.pipelines
    assert len(found.notes) == 5
    assert found.problem is None


def test_a_known_epoch_is_not_read_again() -> None:
    store = jobs_of("a", "b/main")
    read: list[str] = []
    lock = threading.Lock()

    def note(verb: str, path: str) -> None:
        with lock:
            read.extend([path] if verb == "read" else [])

    first = listed(Before(store, note))
    assert read
    read.clear()
    Written(store, legacy_job("c"), files=False).epochs(1)
    found = listed(Before(store, note), first)
    assert {path.partition("/")[0] for path in read} == {"c"}
    assert [pipeline.epoch for pipeline in found.pipelines] == [2, 2, 1]


def test_what_is_not_read_in_time_is_read_by_the_next_listing() -> None:
    store = jobs_of("a", "b/main")
    slow = Before(store, lambda verb, path: time.sleep(1.5 if verb == "read" else 0))
    found = listed(slow, within_seconds=1)
    assert [(pipeline.root, pipeline.epoch) for pipeline in found.pipelines] == [
        ("a", None),
        ("b/main", None),
    ]
    assert found.notes == ("2 pipelines were not read in time",)
    assert [pipeline.epoch for pipeline in listed(store, found).pipelines] == [2, 2]


def test_a_damaged_epoch_is_a_note_and_hides_no_pipeline() -> None:
    store = jobs_of()
    broken = Written(store, legacy_job("broken"), files=False)
    broken.epochs(2)
    broken.damage(2)
    jobs_of("a", store=store)
    found = listed(store)
    assert keys_of(found) == ["a", "broken"]
    assert found.by_root["broken"].managed is None
    assert "broken was not read" in found.notes[0]


def test_secrets_in_sql_are_not_kept() -> None:
    sql = "CREATE TABLE t WITH (connector='kafka', topic='orders', 'auth.password'='s3cret!')"
    answers: Mapping[str, Any] = {
        "/api/v1/jobs": {"data": [{"id": "job", "pipeline_id": "pl", "state": "Running"}]},
        "/api/v1/pipelines": {"data": [{"id": "pl", "name": "x", "query": sql}], "hasMore": False},
    }
    with serving(lambda path, query: Reply(body=answers[path])) as server:
        found = listed(jobs_of("pl/job"), api=server.url)
    assert found.pipelines[0].sql == sql.replace("s3cret!", "***")
    assert "s3cret" not in json.dumps(found.to_json())
