"""`arroyo-state edit`: plans, executes, undoes and refuses as documented."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from arroyo_dagster import Layout, MemoryStore, cli, configure, list_jobs, open_store
from tests.arroyo_server import ModelArroyo, arroyo
from tests.documentation import blocks
from tests.internals import controlled_job
from tests.jobs import copy_into, listing, run_word_job
from tests.surgery_jobs import SurgeryJob, held_rows, surgery_job

SAID = ("job_x", "--assume", "job_x=stopped")


@pytest.fixture
def job(tmp_path: Path) -> Iterator[SurgeryJob]:
    made = surgery_job(Layout.LEGACY)
    store = copy_into(MemoryStore(f"cli-surgery-{tmp_path.name}"), made.store)
    made.store = store
    yield made
    configure(None)


def group_of(command: str) -> tuple[str, ...]:
    return () if command in ("undo", "find-key") else ("edit",)


def run(job: SurgeryJob, *args: str) -> Result:
    command = [*group_of(args[0]), *args, "--url", job.store.url]
    return CliRunner().invoke(cli.main, command, catch_exceptions=False)


def test_the_outcome_is_one_json_document(job: SurgeryJob) -> None:
    plan = json.loads(run(job, "offsets", *SAID, "3=17", "4=-5", "--json").stdout)
    assert (plan["done"], plan["objects"], plan["undo_record"]) == (False, {}, None)
    assert plan["plan"]["operation"] == "offsets"
    options = ("--json", "--yes", "--quiet", "0", "--approve", plan["plan"]["digest"])
    done = json.loads(run(job, "offsets", *SAID, "3=17", "4=-5", *options).stdout)
    assert done["done"]
    assert done["plan"] == plan["plan"]
    (changed,) = done["objects"].values()
    assert changed["before"] != changed["after"]
    assert len(done["unlisted_files"]) == 2
    again = run(job, "offsets", *SAID, "3=17", "4=-5", *options[:4])
    assert again.exit_code == 1
    assert "already edited by these relative positions" in again.stderr


def test_a_job_is_forked_here_and_from_another_url(job: SurgeryJob, tmp_path: Path) -> None:
    source = surgery_job(Layout.PROTOCOL, epochs=5, name="job_a")
    copy_into(open_store(f"file://{tmp_path}"), source.store)
    words = ["fork", "job_a@latest", *SAID, "--from-url", str(tmp_path), "--url", job.store.url]
    was = listing(job.store)
    shown = CliRunner().invoke(cli.main, words, catch_exceptions=False)
    assert "carried" in shown.stdout
    assert "a sink's state means nothing to another job" in shown.stdout
    assert "precondition met: both jobs hash keys alike" in shown.stdout
    assert listing(job.store) == was
    digest = shown.stdout.partition("plan ")[2].split()[0]
    options = ["--yes", "--approve", digest, "--quiet", "0"]
    done = CliRunner().invoke(cli.main, [*words, *options], catch_exceptions=False)
    assert "fork done at epoch 3" in done.stdout
    assert held_rows(job.store, job.paths) == held_rows(source.store, source.paths)
    again = ["fork", "job_x", *SAID, "--url", job.store.url]
    found = CliRunner().invoke(cli.main, again, catch_exceptions=False)
    assert found.exit_code == 1
    assert "would be forked into itself" in found.stderr


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (("offsets", "job_x", "3"), 2, "expected PARTITION=POSITION"),
        (("offsets", "job_x", "3=1", "--approve", "x"), 2, "--approve needs --yes"),
        (("offsets", "job_x", "3=1", "--yes"), 1, "the status of the job is unknown"),
        (("watermark", "job_x", "yesterday"), 1, "not a time: 'yesterday'"),
        (("retain", "job_x", "1969-01-01T00:00:00Z"), 1, "lies before 1970"),
        (("delete-key", "job_x", "k1", "k2"), 1, "no table of the job has a key of 2"),
        (("find-key", "job_x", "k1", "k2"), 1, "no table of the job has a key of 2"),
    ],
)
def test_what_cannot_be_done_is_refused(
    job: SurgeryJob, args: tuple[str, ...], code: int, message: str
) -> None:
    was = listing(job.store)
    found = run(job, *args)
    assert found.exit_code == code
    assert message in found.stderr
    assert listing(job.store) == was


def test_a_managed_job_is_edited_by_an_epoch_and_put_back(tmp_path: Path) -> None:
    store = MemoryStore(f"cli-surgery-managed-{tmp_path.name}")
    run_word_job(store, max_epochs=3)
    (paths,) = list_jobs(store)
    was = listing(store)

    def command(*args: str) -> Result:
        words = [*group_of(args[0]), *args, "--url", store.url]
        return CliRunner().invoke(cli.main, words, catch_exceptions=False)

    shown = command("offsets", paths.root, "row=+2", "--operator", "lines")
    assert 'entry "row" of lines.offsets: "12" becomes "14"' in shown.stdout
    assert "precondition met: no run of the job is active (its last run ended" in shown.stdout
    assert "changes 1 table at epoch 3, as epoch 4; nothing was changed" in shown.stdout
    assert "there is nothing to undo" in command("undo", paths.root).stdout
    assert listing(store) == was
    digest = shown.stdout.partition("plan ")[2].split()[0]
    options = ("--operator", "lines", "--yes", "--approve", digest)
    done = command("offsets", paths.root, "row=+2", *options)
    assert "published as epoch 4, epoch 3 stays pinned" in done.stdout
    shown = command("undo", paths.root)
    assert "the state of epoch 3, from before the edit 'offsets', would be" in shown.stdout
    done = command("undo", paths.root, "--yes", "--json")
    assert json.loads(done.stdout) == {
        "done": True,
        "operation": "offsets",
        "restores_epoch": 3,
        "epoch": 5,
        "why_not": None,
    }
    assert "there is nothing to undo" in command("undo", paths.root, "--yes").stdout
    configure(None)


FOUND = "orders:3:17\norders:4:3500\norders:5:20\norders:6:0\n"
TIME = ("--time", "2026-11-24T10:00:00Z")


def test_offsets_of_a_time_are_planned_as_they_were_looked_up(job: SurgeryJob) -> None:
    command = ["edit", "offsets", *SAID, *TIME, "--operator", "source_kafka_1"]
    command += ["--url", job.store.url, "--lookup", "-"]
    shown = CliRunner().invoke(cli.main, command, input=FOUND)
    assert shown.exit_code == 0, shown.stderr
    for text in (
        "precondition met: first records at or after 2026-11-24T10:00:00.000000Z, as looked up "
        "(partition 3 at 17, now at 3000, partition 5 at 20, now at 20, partition 4 at 3500, now",
        "seen twice: source_kafka_1 partition 3: 2983 records from position 17 to 3000 are read",
        "never seen: source_kafka_1 partition 4: 500 records from position 3000 to 3500 are never",
        "not known: source_kafka_1 partition 6 has no entry in the state: the job reads it from",
    ):
        assert text in shown.stdout
    digest = shown.stdout.partition("plan ")[2].split()[0]
    approved = ("--yes", "--approve", digest, "--quiet", "0")
    as_json = json.dumps({"3": 17, "4": 3500, "5": 20, "6": 0})
    done = CliRunner().invoke(cli.main, [*command, *approved], input=as_json)
    assert "offsets done at epoch 3" in done.stdout, done.stderr
    words = ["sql", "@offsets", "job_x", "--json", "--url", job.store.url]
    read = CliRunner().invoke(cli.main, words)
    positions = {one["partition"]: one["position"] for one in json.loads(read.stdout)}
    assert {"3": 17, "4": 3500, "5": 20}.items() <= positions.items()


@pytest.mark.parametrize(
    ("options", "text", "message"),
    [
        ((), FOUND, "a lookup is of one source, and the job has 2"),
        (("--operator", "source_kafka_1"), "orders:3:17\n", "no offset of partition 5"),
        ((), "orders:3:17\nsales:4:1\n", "several topics: orders, sales"),
        ((), "orders:3:\n", "no record of partition 3 of topic orders is at or after the time"),
        ((), "orders 3 17", "not a line of a lookup: orders 3 17"),
        ((), "orders:3:17\norders:3:18", "has a partition twice"),
        ((), "", "the lookup has no partition"),
        ((), '{"3": "earliest"}', "the lookup has no offset of partition 3"),
        ((), '{"3": ', "the lookup is no JSON"),
        ((), '{"3": 5, "3": 6}', "the lookup has a partition twice"),
        ((), b"\xff", "the lookup is no text in UTF-8"),
    ],
)
def test_a_lookup_that_does_not_fit_is_refused(
    job: SurgeryJob, options: tuple[str, ...], text: str | bytes, message: str
) -> None:
    command = ["edit", "offsets", *SAID, *TIME, *options, "--url", job.store.url]
    refused = CliRunner().invoke(cli.main, [*command, "--lookup", "-"], input=text)
    assert (refused.exit_code, message in refused.stderr) == (1, True), refused.stderr


def test_a_time_without_a_lookup_is_answered_with_the_command_for_it(job: SurgeryJob) -> None:
    documented = blocks("docs/edit-state.md", "sh")[2].partition(" > ")[0]
    refused = run(job, "offsets", *SAID, *TIME)
    assert refused.exit_code == 2
    assert documented.replace("orders", "TOPIC") in " ".join(refused.stderr.split())
    assert run(job, "offsets", *SAID, "3=1", *TIME).exit_code == 2
    assert run(job, "offsets", *SAID).exit_code == 2


def test_the_documented_commands_show_their_plan(
    job: SurgeryJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, _, *others, _, _ = blocks("docs/edit-state.md", "sh")
    lines = "".join([first, *others]).splitlines()
    surgery_job(Layout.PROTOCOL, epochs=5, name="job_a", store=job.store)
    was = listing(job.store)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "found.txt").write_text(FOUND)
    lines = [line for line in lines if not line.startswith("kafka-get-offsets.sh")]
    assert len(lines) == 12
    for line in lines:
        words = line.partition("#")[0].replace("JOB", "job_x").replace("SOURCE", "job_a")
        words = shlex.split(words)
        shown = CliRunner().invoke(cli.main, [*words[1:], "--url", job.store.url])
        assert shown.exit_code == 0, shown.stderr
        assert "job_x" in shown.stdout or words[1] in ("sql", "diff")
    assert listing(job.store) == was


# ---- in a window ---------------------------------------------------------------------------------


def test_documented_windows_are_executed(job: SurgeryJob, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(controlled_job, "POLL_SECONDS", 0.01)
    surgery_job(Layout.LEGACY, epochs=5, name="job_a", store=job.store)
    lines = blocks("docs/edit-state.md", "sh")[1].splitlines()
    assert len(lines) == 2
    for line in lines:
        with arroyo(ModelArroyo(job, seconds_a_request=2.0)) as server:
            words = line.replace("JOB", "job_x").replace("SOURCE", "job_a").split()[1:]
            words[words.index("--arroyo-api") + 1] = server.url
            done = CliRunner().invoke(cli.main, [*words, "--url", job.store.url])
        assert "job_x: rewritten, runs again" in done.stdout, done.output


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (("--window",), "--window needs --arroyo-api"),
        (("--window", "--arroyo-api", "http://x", "--yes", "--approve", "d"), "another digest"),
    ],
)
def test_options_refused_with_a_window(job: SurgeryJob, args: tuple[str, ...], told: str) -> None:
    refused = run(job, "delete-key", "job_x", "k1", *args)
    assert (refused.exit_code, told in refused.stderr) == (2, True), refused.output


def test_no_arroyo_can_stop_a_managed_job(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    run_word_job(store)
    (paths,) = list_jobs(store)
    refused = CliRunner().invoke(
        cli.main,
        [
            *("edit", "offsets", paths.root, "all=0", "--window", "--arroyo-api", "http://x"),
            *("--url", str(tmp_path)),
        ],
    )
    assert refused.exit_code == 1
    assert "this is a managed job: no Arroyo can stop it" in refused.output
