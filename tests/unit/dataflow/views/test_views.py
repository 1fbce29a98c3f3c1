"""Views: one epoch, look-ups, expiry, refresh; what a reader sees while a builder goes on."""

from __future__ import annotations

import threading

import pytest

from arroyo_dagster.dataflow.errors import CheckpointError
from arroyo_dagster.dataflow.views.view import Views
from arroyo_dagster.state import CompactionPolicy, CompactionSettings, run_compaction, run_gc
from arroyo_dagster.state.storage.wrappers import Counting
from tests.dataflows import Clock, Flow, builder, definition, reader, row_of
from tests.gc_jobs import expiry

FULL = CompactionSettings(policy=CompactionPolicy.FULL)
COUNT = "row = counts()\nrow.n += 1\nif record == 'z':\n    row.delete()\nelse:\n    row.update()"


def rows_flow() -> Flow:
    return Flow(definition(builder(COUNT, value=row_of(n="u32")), converter="raw"))


def test_a_view_goes_on_over_deletes_and_compactions_reading_only_what_is_new() -> None:
    flow = rows_flow()
    views = flow.views()
    assert views.view("counts").frame().height == 0
    for turn, words in enumerate((["a", "z"], ["b"], ["a"], ["z", "c"], ["c"])):
        flow.send("words", words)
        if turn == 2:
            run_compaction(flow.store, flow.pipelines[0].paths, FULL)
            flow.restart()
        views.refresh()
        fresh = flow.views().view("counts").frame()
        assert views.view("counts").frame().equals(fresh)
    assert [row[:2] for row in fresh.rows()] == [("a", 2), ("b", 1), ("c", 2)]


def test_a_refresh_reads_the_files_that_are_new() -> None:
    flow = rows_flow()
    flow.topics["words"].per_epoch = 1
    flow.send("words", [f"w{at}" for at in range(12)])
    counted = Counting(flow.store)
    views = Views(counted, flow.dataflow)
    views.view("counts")
    whole = sum(counted.calls.values())
    flow.send("words", ["more"])
    counted.calls.clear()
    views.refresh()
    assert views.view("counts").get("more") == {"n": 1}
    assert sum(counted.calls.values()) < whole / 2


def test_e51_a_broken_checkpoint_is_named_and_nothing_is_shown() -> None:
    flow = rows_flow().send("words", ["a"])
    paths = [info.path for info in flow.store.list("") if "table-counts" in info.path]
    flow.store.put(paths[0], b"no parquet")
    with pytest.raises(CheckpointError) as error:
        flow.views().view("counts")
    facts = error.value.facts
    assert (facts["number"], facts["epoch"], facts["path"]) == ("E51", 1, paths[0])
    flow.store.delete_many(paths)
    with pytest.raises(CheckpointError):
        flow.views().view("counts")
    manifests = [info.path for info in flow.store.list("") if "manifest" in info.path]
    for path in manifests:
        flow.store.put(path, b"\xff\xff broken")
    with pytest.raises(CheckpointError):
        flow.views()
    with pytest.raises(CheckpointError):
        _ = flow.pipelines


def test_rows_leave_a_view_as_time_goes_by() -> None:
    clock = Clock()
    value = row_of(n="u32")[:-1] + ", ttl: 10s}"
    flow = Flow(definition(builder(COUNT, value=value), converter="raw"), clock=clock)
    flow.send("words", ["a"])
    clock.ms += 5_000
    flow.send("words", ["b"])
    found = flow.views().view("counts")
    assert found.sql("select count(*) from counts").item() == 2
    clock.ms += 5_000
    assert found.sql("select count(*) from counts").item() == 1
    assert (found.get("a"), found.get("b")) == (None, {"n": 1})
    clock.ms += 5_000
    assert found.frame().height == 0


def test_all_states_of_an_owner_are_of_one_epoch_while_it_goes_on() -> None:
    """A builder adds to two states in a thread; a reader never sees one without the other."""
    services = """
  build:
    sources: [{type: topic, id: words}]
    states:
      cells: {type: keyed-state, properties: {key: {type: string}, value: {type: u32}}}
      counts: {type: keyed-state, properties: {key: {type: string}, value: %s}}
    partition:
      assign-key:
        run: |
          def one(word):
              return "k"
      update-state:
        run: |
          def both(word):
              cells().increment(1)
              row = counts()
              row.n += 1
              row.update()
""" % row_of(n="u32")  # noqa: UP031 - braces are YAML's here
    flow = Flow(definition(services, converter="raw"), keep_epochs=2)
    flow.topics["words"].per_epoch = 1
    flow.send("words", ["x"])
    flow.topics["words"].send(*["x"] * 40)
    builder_thread = threading.Thread(target=flow.run)
    views = flow.views()
    seen: list[int] = []
    builder_thread.start()
    while builder_thread.is_alive() or views.refresh():
        views.refresh()
        try:
            cells, rows = views.view("cells").get("k"), views.view("counts").get("k")
        except CheckpointError:
            continue  # it had expired: nothing is shown rather than something else
        assert rows == {"n": cells}
        seen.append(cells)
    builder_thread.join()
    assert seen == sorted(seen)
    assert flow.cells("cells") == {"k": 41}


def test_a_reader_service_whose_epoch_has_expired_goes_on_with_the_newest() -> None:
    flow = Flow(
        definition(
            builder("counts().increment(1)") + reader("return str(counts())"), converter="raw"
        )
    )
    flow.topics["words"].per_epoch = 1
    flow.send("words", ["a", "a", "a", "a"])
    run_gc(flow.store, flow.pipelines[0].paths, expiry(2))
    assert flow.send("asked", ["?"]).sinks["answers"].values == ["[('a', 4)]"]
