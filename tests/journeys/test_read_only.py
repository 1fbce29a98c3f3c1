"""Read-only prefixes and marks: jobs that every command and deployment shows, and none changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from click.testing import CliRunner

from arroyo_dagster.cli import main
from arroyo_dagster.errors import InputError
from arroyo_dagster.orchestration import (
    ArroyoOptions,
    GcConfig,
    InProcessRunner,
    MaintenanceOptions,
    build_arroyo_definitions,
)
from arroyo_dagster.state import Layout, MemoryStore, StatePath, configure, open_store
from arroyo_dagster.state.model.layout import mark_path
from tests.arroyo_jobs import EVENTS, SECOND, ArroyoJob, table_rows, window_config
from tests.arroyo_server import ModelArroyo, arroyo
from tests.documentation import blocks
from tests.internals import break_lease
from tests.jobs import copy_into, listing, run_word_job, word_job, written_by_word_job
from tests.orchestration.results import JOB as OPTIONS
from tests.orchestration.results import failure

KEY, OTHER = "words/main", "words/ours"
MARKED = "is shown and checked, and never compacted, rewritten or deleted"
CHANGES = {
    "compact": ["compact", "run", KEY, "--policy", "full", "--yes"],
    "expire": ["gc", "run", "expire", KEY, "--keep", "2", "--yes"],
    "orphans": ["gc", "run", "orphans", KEY, "--yes"],
    "purge": ["gc", "purge", KEY, "--yes"],
    "pin": ["pin", KEY, "7"],
    "unpin": ["unpin", KEY, "7"],
    "rollback": ["rollback", KEY, "4", "--yes"],
}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return tmp_path


@pytest.fixture
def jobs(home: Path) -> Path:
    """A working directory, with two jobs in `state`."""
    store = open_store(str(home / "state"), options={"sync": False})
    for job in ("main", "ours"):
        written = written_by_word_job(**OPTIONS, job=job, max_epochs=8)
        copy_into(store, written)
    return home


def configured(home: Path, *prefixes: object, user: bool = False) -> Path:
    path = home / ("config/arroyo_dagster/config.toml" if user else "arroyo-state.toml")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"read_only = {[str(prefix) for prefix in prefixes]}\n")
    return path


def run(home: Path, *words: str) -> Any:
    return CliRunner().invoke(main, [*words, "--url", str(home / "state")])


# ---- the configuration file ----------------------------------------------------------------------


@pytest.mark.parametrize("command", CHANGES)
def test_commands_refuse_and_name_the_file_and_the_prefix(command: str, jobs: Path) -> None:
    prefix = jobs / "state" / "words"
    file = configured(jobs, prefix)
    before = listing(open_store(str(jobs / "state")))
    refused = run(jobs, *CHANGES[command])
    assert refused.exit_code == 1, refused.output
    assert f"{prefix} is read-only by {file}" in refused.output
    assert f"remove the prefix from `read_only` in {file}" in refused.output
    assert listing(open_store(str(jobs / "state"))) == before
    assert run(jobs, "verify", KEY).exit_code == 0
    assert run(jobs, "jobs").exit_code == 0


def test_other_jobs_are_maintained(jobs: Path) -> None:
    configured(jobs, jobs / "state" / "words" / "our", jobs / "state" / OTHER)
    assert run(jobs, *CHANGES["compact"]).exit_code == 0
    assert run(jobs, "compact", "run", OTHER, "--policy", "full", "--yes").exit_code == 1


def test_no_file_lifts_the_prefix_of_another(jobs: Path) -> None:
    configured(jobs, jobs / "state" / "elsewhere")
    configured(jobs, jobs / "state" / KEY, user=True)
    assert "config.toml" in run(jobs, *CHANGES["compact"]).output


def test_the_documented_file_is_obeyed(jobs: Path) -> None:
    (text,) = blocks("docs/operate/schedules.md", "toml")
    text = text.replace("s3://bucket/arroyo/payments", str(jobs / "state" / "words"))
    (jobs / "arroyo-state.toml").write_text(text)
    assert "is read-only by" in run(jobs, *CHANGES["compact"]).output


def test_a_run_of_the_job_itself_is_refused(jobs: Path) -> None:
    configured(jobs, jobs / "state")
    store = open_store(str(jobs / "state"))
    before = listing(store)
    with pytest.raises(InputError, match="is read-only by"):
        run_word_job(store, **OPTIONS)
    assert listing(store) == before


WRITES = {
    "put": lambda store, path: store.put(path, b"x"),
    "create": lambda store, path: store.create(path, b"x"),
    "copy": lambda store, path: store.copy(StatePath("free/a"), path),
    "delete": lambda store, path: store.delete_many([StatePath("free/a"), path]),
}


@pytest.mark.parametrize("write", WRITES)
def test_a_store_refuses_each_write_below_the_prefix_only(write: str, home: Path) -> None:
    open_store(str(home / "state")).put(StatePath("free/a"), b"a")
    configured(home, home / "state" / "words")
    above, below = open_store(str(home / "state")), open_store(str(home / "state" / "words"))
    before = listing(above)
    for store, path in ((above, "words/main/x"), (below, "main/x"), (below, "x")):
        with pytest.raises(InputError, match="is read-only by") as refused:
            WRITES[write](store, StatePath(path))
        assert refused.value.next_step
        assert listing(above) == before
    WRITES[write](above, StatePath("wordsy/x"))
    assert listing(above) != before


@pytest.mark.parametrize(
    ("prefix", "url"),
    [
        ("s3://bucket/a/b/", "s3://bucket/a/b"),
        ("s3://bucket/a//b/.", "s3a://bucket/a/b/c"),
        ("S3A://BUCKET/a/b", "s3::http://minio:9000/bucket/a/b"),
        ("s3::http://MINIO:9000/bucket/a", "s3::http://minio:9000/bucket/a/b"),
        ("s3::http://minio:9000/bucket/a", "s3://bucket/a/b"),
        (
            "https://s3.eu-west-1.amazonaws.com/bucket/a",
            "https://bucket.s3.us-east-1.amazonaws.com/a",
        ),
        ("HTTPS://Bucket.S3.EU-West-1.amazonaws.com/a", "s3://bucket/a"),
        ("s3://bucket", "s3://bucket/a"),
        ("s3://bucket/", "s3://bucket"),
        ("s3://bucket/a%20b", "s3://bucket/a b"),
        ("s3://bucket/a b", "s3://bucket/a%2520b"),
        ("s3://bucket/a%2Fb", "s3://bucket/a/b/c"),
        ("r2://Account@bucket/a", "r2://account@bucket/a"),
        ("r2://bucket/a", "r2://account@bucket/a"),
        ("r2://bucket/a", "s3://bucket/a"),
        ("gs://bucket/a", "https://storage.googleapis.com/bucket/a/b"),
        ("abfs://c@account.dfs.core.windows.net/a", "https://account.blob.core.windows.net/c/a"),
        ("FILE:///tmp/none/a", "/tmp/none/a/"),
        ("/tmp/none//a", "file:///tmp/none/./a/b"),
        ("file:/tmp/none/a%20b", "/tmp/none/a b"),
        ("file://None/A", "/None/A/b"),
        ("/tmp/none/A://B/c", "/tmp/none/A:/B/c"),
    ],
)
def test_all_spellings_of_a_location_are_one(prefix: str, url: str, home: Path) -> None:
    configured(home, prefix)
    with pytest.raises(InputError, match="is read-only by"):
        open_store(url).put(StatePath("x"), b"")


@pytest.mark.parametrize(
    ("prefix", "url", "path"),
    [
        ("{0}/a/b", "{0}", "a/b"),
        ("{0}/a/b", "{0}", "a/b/c"),
        ("{0}/a b", "{0}", "a b/c"),
        ("{0}/a%20b", "{0}", "a b/c"),
        ("{0}/real", "{0}/link", "x"),
        ("{0}/link", "{0}/real", "x"),
    ],
)
def test_paths_on_local_disk(prefix: str, url: str, path: str, home: Path) -> None:
    (home / "real").mkdir()
    (home / "link").symlink_to(home / "real")
    configured(home, prefix.format(home))
    with pytest.raises(InputError, match="is read-only by"):
        open_store(url.format(home)).create(StatePath(path), b"")


@pytest.mark.parametrize(
    ("prefix", "url"),
    [
        ("{0}/a/b", "{0}/a/bc"),
        ("{0}/a/b", "{0}/b"),
        ("{0}/a/b", "{0}/A/b"),
        ("s3://bucket/a", "{0}/a"),
        ("s3://bucket{0}", "{0}"),
    ],
)
def test_other_locations_are_changed(prefix: str, url: str, home: Path) -> None:
    configured(home, prefix.format(home))
    open_store(url.format(home)).put(StatePath("x"), b"")


@pytest.mark.parametrize(
    "text",
    [
        "read_only = 's3://bucket'",
        "read-only = [1]",
        "read_only = ['payments']",
        "read_only = ['s3://bucket/a/../b']",
        "read_only = ['s3://bucket/a/%2e%2e/b']",
        "read_only = ['']",
        "[gc.run]\nread_only = ['s3://bucket']",
        "read_only = [",
    ],
)
def test_a_file_that_cannot_be_obeyed_opens_no_store(text: str, home: Path) -> None:
    (home / "arroyo-state.toml").write_text(text)
    with pytest.raises(InputError) as refused:
        open_store(str(home / "state"))
    assert "arroyo-state.toml" in str(refused.value)
    assert run(home, "jobs").exit_code == 1


# ---- marks ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", CHANGES)
def test_commands_obey_an_object_that_marks_a_job(command: str, jobs: Path) -> None:
    store = open_store(str(jobs / "state"))
    for prefix, data in (
        (".", b'{"version": 1, "ownership": "other", "note": "team billing"}'),
        ("words", b"\xff"),
        (KEY, b""),
    ):
        store.put(mark_path(prefix), data)
        before = listing(store)
        refused = run(jobs, *CHANGES[command])
        assert refused.exit_code == 1, refused.output
        assert MARKED in refused.output
        assert (
            "delete the object. To replace the mark, give read-only credentials" in refused.output
        )
        place = f"{store.url}/{prefix}".removesuffix("/.")
        assert f'write read_only = ["{place}"] into the configuration file' in refused.output
        assert ("team billing" in refused.output) is (prefix == ".")
        assert listing(store) == before
        store.delete_many([mark_path(prefix)])


def test_the_lease_of_a_marked_job_is_not_broken(jobs: Path) -> None:
    store = open_store(str(jobs / "state"))
    store.put(mark_path("words"), b"{}")
    with pytest.raises(InputError, match=MARKED):
        break_lease(store, word_job(store).paths, "maintenance", sleep=lambda _: None)


def test_a_mark_forbids_no_other_job_and_no_run(jobs: Path) -> None:
    store = open_store(str(jobs / "state"))
    for prefix in (OTHER, "word"):  # a part of the name, and another pipeline
        store.put(mark_path(prefix), b"{}")
    assert run(jobs, *CHANGES["compact"]).exit_code == 0
    store.put(mark_path(KEY), b"{}")
    run_word_job(store, **OPTIONS)
    assert run(jobs, "verify", KEY).exit_code == 0
    assert len(run(jobs, "jobs").output.splitlines()) == 3  # a mark is no job


@pytest.mark.parametrize("how", ["file", "mark"])
def test_a_running_arroyo_job_is_not_stopped(how: str, home: Path) -> None:
    store = MemoryStore(f"read-only-{how}")
    model = ModelArroyo(ArroyoJob(Layout.PROTOCOL, watermark_micros=30 * SECOND, store=store))
    rows = table_rows(EVENTS, [["a", "b"], [1, 2], [20 * SECOND * 1000] * 2])
    for _ in range(4):
        model.job.write({("tumbling_1", window_config(EVENTS, ["k"], retention=600)): rows})
    if how == "file":
        configured(home, store.url)
    else:
        store.put(mark_path("pl_x"), b"{}")
    before, job = listing(store), model.job.job
    stopped = ("--assume", f"{job}=stopped", "--yes")

    def refused(*words: str) -> None:
        answer = CliRunner().invoke(main, [*words, "--url", store.url])
        assert answer.exit_code == 1, answer.output
        assert ("is read-only by" if how == "file" else MARKED) in answer.output
        assert listing(store) == before

    try:
        with arroyo(model) as server:
            refused("compact", "window", job, "--now", "--arroyo-api", server.url, "--yes")
        assert (model.state, model.stop, model.log) == ("Running", "none", [])
        refused("compact", "run", job, "--policy", "full", "--quiet", "0", *stopped)
    finally:
        configure(None)


# ---- Dagster -------------------------------------------------------------------------------------


def test_dagster_shows_such_jobs_and_refuses_to_change_them(
    jobs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, third = open_store(str(jobs / "state")), "words/third"
    run_word_job(store, **OPTIONS, job="third", max_epochs=4)
    configured(jobs, jobs / "state" / KEY, user=True)
    store.put(mark_path(OTHER), b"{}")
    monkeypatch.chdir(Path(__file__).parents[2])
    defs = build_arroyo_definitions(
        store.url,
        mode="maintain",
        options=ArroyoOptions(
            runner=InProcessRunner(),
            maintenance=MaintenanceOptions(gc=GcConfig(keep_epochs=2, dry_run=False)),
        ),
    )
    before, repository = listing(store), defs.get_repository_def()
    with dg.instance_for_test() as instance:

        def execute(job: str, root: str, table: str) -> Any:
            return defs.resolve_job_def(job).execute_in_process(
                instance=instance,
                asset_selection=[dg.AssetKey(["arroyo", *root.split("/"), table])],
                raise_on_error=False,
            )

        assert defs.resolve_job_def("arroyo_verify").execute_in_process(instance=instance).success
        for job, root, table, words in (
            ("arroyo_compaction", KEY, "compacted_state", "is read-only by"),
            ("arroyo_gc", OTHER, "retained_epochs", MARKED),
        ):
            result = execute(job, root, table)
            assert not result.success
            assert words in str(failure(result).description)
        # Of the pipelines that need it most, these are left out.
        with dg.build_schedule_context(
            instance=instance, repository_def=repository, resources=defs.resources
        ) as context:
            tick = defs.resolve_schedule_def("arroyo_gc_schedule").evaluate_tick(context)
        (request,) = tick.run_requests
        (key,) = request.asset_selection
        assert key.path[1:3] == third.split("/")
        assert execute("arroyo_gc", third, "retained_epochs").success
    changed = dict(listing(store).items() ^ before.items())
    assert all(path.startswith(f"{third}/") for path in changed)
