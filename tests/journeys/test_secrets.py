"""No command repeats a secret, wherever it was given and whatever goes wrong.

Every command of the click tree is run, new ones included, in every situation: a canary in the user
info or the query of each URL, in credentials, in headers, in the environment; with an endpoint that
is dead, one that answers and repeats all it was sent, and a root that is missing.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from urllib.parse import quote
from xml.sax.saxutils import escape

import click
import pytest
from click.testing import CliRunner

from arroyo_dagster import cli, redaction
from arroyo_dagster.state import MemoryStore, configure
from arroyo_dagster.state.storage.remote import obstore_options, s3_store
from arroyo_dagster.state.storage.remote.options import Patience
from tests.commands import leaves
from tests.compat.arroyo import DATA, unpack
from tests.jobs import run_word_job
from tests.loopback import listening
from tests.secrets import CANARY, PIECE, assert_no_canary
from tests.shares import Share, dealt_out

EXAMPLES = Path(__file__).parents[2] / "examples" / "sdf"
DATAFLOW = str(EXAMPLES / "words" / "dataflow.yaml")
PACKAGE = str(next((EXAMPLES / "packages").rglob("sdf-package.yaml")))
SENT = "KNRa@KNRb/KNRc?KNRd#KNRe%41KNRf&KNRx=KNRy:KNRz~KNRq"
"""A canary that a header can carry."""
QUICK = Patience(
    max_retries=0,
    retry_timeout_seconds=0.5,
    backoff_seconds=0.01,
    max_backoff_seconds=0.01,
    connect_timeout_seconds=1.0,
    request_timeout_seconds=2.0,
)


def _command(path: Sequence[str]) -> click.Command:
    found: click.Command = cli.main
    for name in path:
        assert isinstance(found, click.Group)
        below = found.get_command(click.Context(found), name)
        assert below is not None
        found = below
    return found


OF_PACKAGES = {*(("sdf", "test", "section"), ("sdf", "test", "function"))}
COMMANDS = sorted(leaves(cli.main))
VALUES = {
    "job": "main",
    "jobs": "main",
    "file": DATAFLOW,
    "pipeline": "tests.words:PIPELINE",
    "operator": "count",
    "table": "counts",
    "query": "select 1",
    "namespace": "count-words/state/word-counts",
    "path": "words/main/x",
    "quarantine": "q-1",
    "name": "count-word",
    "--keep": "2",
}


def _arguments(command: click.Command, job: str) -> list[str]:
    """Something for everything that a command demands, and for every argument it may have."""
    given: list[str] = []
    for one in command.params:
        name = one.name if isinstance(one, click.Argument) else one.opts[0]
        if isinstance(one.type, click.Choice):
            value = str(one.type.choices[0])
        else:
            value = VALUES.get(str(name), "1")
        value = job if value == "main" else value
        if isinstance(one, click.Argument):
            given.append(value)
        elif one.required and name not in ("--arroyo-api",):
            given += [str(name), value]
    return given


@dataclass(frozen=True)
class Situation:
    """Where the canary is. `options`: by name, for the commands that have them."""

    url: str
    env: dict[str, str] = field(default_factory=dict)
    options: dict[str, str] = field(default_factory=dict)
    job: str = "main"


@contextlib.contextmanager
def echoing(status: int = 403) -> Iterator[int]:
    """A server that refuses everything and repeats whatever it was sent, and the canary.

    Args:
        status: of its answers.
    """

    class Handler(BaseHTTPRequestHandler):
        def _refuse(self) -> None:
            heard = f"{self.path} {dict(self.headers.items())}"
            if "api/v1" in self.path:
                body = json.dumps({"error": f"{self.headers['Authorization']} {heard}"}).encode()
            else:
                heard += f" {CANARY} {quote(CANARY)} {CANARY!r}"
                name = "InvalidToken" if status == 403 else "SlowDown"
                code = f"<Error><Code>{name}</Code><Message>%s</Message></Error>"
                body = (code % escape(heard)).encode()
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = do_PATCH = _refuse  # noqa: N815

        def log_message(self, *_: object) -> None:
            pass

    with listening(Handler) as port:
        yield port


@pytest.fixture(scope="module")
def echo() -> Iterator[int]:
    with echoing() as port:
        yield port


@pytest.fixture(scope="module")
def legacy(tmp_path_factory: pytest.TempPathFactory) -> str:
    return unpack("legacy", tmp_path_factory.mktemp("legacy"))


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(redaction, "_KNOWN", set())
    for module in (obstore_options, s3_store):
        monkeypatch.setattr(module, "patience_of", lambda options, url: QUICK)
    yield
    configure(None)


AWS = {"AWS_ACCESS_KEY_ID": "somebody", "AWS_SECRET_ACCESS_KEY": CANARY, "AWS_REGION": "here"}
DEAD = 9
SITUATIONS = {
    "user-info": lambda echo, legacy: Situation(url=f"https://user:{CANARY}@host:9000/bucket/k"),
    "user-info-of-an-endpoint": lambda echo, legacy: Situation(
        url=f"s3::http://user:{CANARY}@127.0.0.1:{DEAD}/bucket/k"
    ),
    "token-as-user": lambda echo, legacy: Situation(url=f"https://{CANARY}@host/bucket/k"),
    "user-of-a-file": lambda echo, legacy: Situation(url=f"file://user:{SENT}@host/root"),
    "query": lambda echo, legacy: Situation(url=f"https://host/bucket/k?sig={CANARY}"),
    "query-of-s3": lambda echo, legacy: Situation(url=f"s3://bucket/k?token={CANARY}"),
    "query-of-a-file": lambda echo, legacy: Situation(url=f"file:///nowhere?token={CANARY}"),
    "url-in-the-environment": lambda echo, legacy: Situation(
        url="", env={"ARROYO__CHECKPOINT_URL": f"https://user:{CANARY}@host/b"}
    ),
    "dead": lambda echo, legacy: Situation(
        url=f"s3::http://127.0.0.1:{DEAD}/bucket/k", env={**AWS, "AWS_SESSION_TOKEN": SENT}
    ),
    "dead-fsspec": lambda echo, legacy: Situation(
        url=f"s3::http://127.0.0.1:{DEAD}/bucket/k",
        env={**AWS, "AWS_SESSION_TOKEN": SENT, "ARROYO_DAGSTER_STORE_CLIENT": "fsspec"},
    ),
    "token-no-header-can-carry": lambda echo, legacy: Situation(
        url=f"s3::http://127.0.0.1:{DEAD}/bucket/k", env={**AWS, "AWS_SESSION_TOKEN": CANARY}
    ),
    "endpoint-with-a-password": lambda echo, legacy: Situation(
        url="s3://bucket/k", env={**AWS, "AWS_ENDPOINT_URL": f"http://user:{CANARY}@127.0.0.1:9"}
    ),
    "echo": lambda echo, legacy: Situation(
        url=f"s3::http://127.0.0.1:{echo}/bucket/k", env={**AWS, "AWS_SESSION_TOKEN": SENT}
    ),
    "echo-fsspec": lambda echo, legacy: Situation(
        url=f"s3::http://127.0.0.1:{echo}/bucket/k",
        env={**AWS, "AWS_SESSION_TOKEN": SENT, "ARROYO_DAGSTER_STORE_CLIENT": "fsspec"},
    ),
    "azure": lambda echo, legacy: Situation(
        url="abfss://box@account.dfs.core.windows.net/k",
        env={
            "AZURE_STORAGE_ACCOUNT_KEY": CANARY,
            "AZURE_STORAGE_ENDPOINT": f"http://127.0.0.1:{echo}",
        },
    ),
    "gcs": lambda echo, legacy: Situation(
        url="gs://bucket/k", env={"GOOGLE_SERVICE_ACCOUNT_KEY": json.dumps({"private_key": CANARY})}
    ),
    "missing-root": lambda echo, legacy: Situation(
        url="/nowhere/at/all", env={**AWS, "ARROYO_API_TOKEN": CANARY}
    ),
    "works": lambda echo, legacy: Situation(
        url="memory://secrets", env={**AWS, "ARROYO_API_TOKEN": CANARY}
    ),
    "api-with-a-password": lambda echo, legacy: Situation(
        url=legacy,
        options={"--arroyo-api": f"http://user:{CANARY}@127.0.0.1:9"},
        job="job_d14OMmRXhf",
    ),
    "api-with-a-query": lambda echo, legacy: Situation(
        url=legacy,
        options={"--arroyo-api": f"http://127.0.0.1:9/?token={CANARY}"},
        job="job_d14OMmRXhf",
    ),
    "api-in-the-environment": lambda echo, legacy: Situation(
        url=legacy, env={"ARROYO_API_URL": f"http://{CANARY}@127.0.0.1:9"}, job="job_d14OMmRXhf"
    ),
    "api-echo": lambda echo, legacy: Situation(
        url=legacy,
        env={"ARROYO_API_TOKEN": SENT},
        options={"--arroyo-api": f"http://127.0.0.1:{echo}"},
        job="job_d14OMmRXhf",
    ),
    "api-bad-token": lambda echo, legacy: Situation(
        url=legacy,
        env={"ARROYO_API_TOKEN": CANARY},
        options={"--arroyo-api": f"http://127.0.0.1:{echo}"},
        job="job_d14OMmRXhf",
    ),
    "database-works": lambda echo, legacy: Situation(
        url=legacy,
        env=AWS,
        options={"--arroyo-db": str(DATA / "state-legacy.sqlite")},
        job="job_d14OMmRXhf",
    ),
    "database-with-a-password": lambda echo, legacy: Situation(
        url=legacy,
        options={"--arroyo-db": f"https://user:{CANARY}@host/bucket/state.sqlite"},
        job="job_d14OMmRXhf",
    ),
    "database-with-a-query": lambda echo, legacy: Situation(
        url=legacy,
        options={"--arroyo-db": f"/nowhere/state.sqlite?key={CANARY}"},
        job="job_d14OMmRXhf",
    ),
    "database-as-sqlite-names-it": lambda echo, legacy: Situation(
        url=legacy, options={"--arroyo-db": f"file:state.sqlite?key={CANARY}"}, job="job_d14OMmRXhf"
    ),
    "database-dead": lambda echo, legacy: Situation(
        url=legacy,
        env=AWS,
        options={"--arroyo-db": f"s3::http://127.0.0.1:{DEAD}/bucket/state.sqlite"},
        job="job_d14OMmRXhf",
    ),
    "topics": lambda echo, legacy: Situation(
        url="memory://secrets-2",
        options={
            "--source": f"sentences=jsonl:https://user:{CANARY}@host/in",
            "--sink": f"counts=jsonl:s3::http://user:{SENT}@host:9/out?sig={CANARY}",
            "-e": f"TOKEN={CANARY}",
            "--spark": f"spark.secret={CANARY}",
            "--spark-checkpoint": f"s3://user:{CANARY}@host/b",
        },
    ),
    "no-topics": lambda echo, legacy: Situation(
        url="memory://secrets-2",
        options={"--source": f"https://user:{CANARY}@host/in", "-e": CANARY},
    ),
    "arguments": lambda echo, legacy: Situation(
        url="memory://secrets-2",
        options={"--between": f"https://user:{CANARY}@host", "": f"https://user:{CANARY}@host/x"},
    ),
}


@pytest.fixture(scope="module", autouse=True)
def works() -> None:
    run_word_job(MemoryStore("secrets"), rows=8, sinks=0, keep_epochs=None)


@pytest.mark.parametrize(("situation", "share"), dealt_out(SITUATIONS, 3))
def test_no_command_repeats_a_secret(
    situation: str,
    share: Share,
    echo: int,
    legacy: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    given = SITUATIONS[situation](echo, legacy)
    monkeypatch.chdir(tmp_path)
    for name, value in given.env.items():
        monkeypatch.setenv(name, value)
    caplog.set_level(logging.INFO)
    assert PIECE in f"{given}"
    for number, path in share(enumerate(COMMANDS, start=[*SITUATIONS].index(situation))):
        # Half of them as JSON, the other half in the next situation.
        words = _words(path, given, as_json=number % 2 == 0)
        answer = CliRunner().invoke(cli.main, words)
        assert_no_canary(f"{' '.join(path)}: {answer.output} {answer.stderr}")
        # Anything else would have ended in a traceback.
        assert isinstance(answer.exception, SystemExit | None), path
    assert_no_canary(caplog.text)


def _words(path: tuple[str, ...], given: Situation, *, as_json: bool) -> list[str]:
    command = _command(path)
    known = {option for one in command.params for option in one.opts}
    words = [*path, *_arguments(command, given.job)]
    if path in OF_PACKAGES:
        words = [PACKAGE if one == DATAFLOW else one for one in words]
    if "--url" in known and given.url:
        words += ["--url", given.url]
    for option, value in given.options.items():
        if option in known or not option:
            words += [option, value] if option else [value]
    return [*words, "--json"] if as_json and "--json" in known else words


@pytest.mark.parametrize("at", [(), ("sdf",), ("gc",), ("jobs", "--json")])
def test_a_url_in_place_of_a_command_is_not_repeated(at: tuple[str, ...]) -> None:
    answer = CliRunner().invoke(cli.main, [*at, f"https://user:{CANARY}@host/b"])
    assert answer.exit_code == 2
    assert_no_canary(answer.output + answer.stderr)


def test_nothing_that_is_stored_holds_a_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "ARROYO_API_TOKEN"):
        monkeypatch.setenv(name, CANARY)
    monkeypatch.setenv("HTTPS_PROXY", f"http://user:{CANARY}@proxy:3128")
    store = MemoryStore("secrets-stored")
    run_word_job(store, rows=24, sinks=0, keep_epochs=None)
    before = {info.path for info in store.list()}
    for words in (
        ("pin", "main", "3", "--reason", "to look at"),
        ("compact", "run", "main", "--policy", "full", "--yes"),
        ("gc", "run", "expire", "main", "--keep", "2", "--yes"),
        ("gc", "run", "orphans", "main", "--yes", "--assume", "main=stopped"),
        ("stop", "main"),
    ):
        answer = CliRunner().invoke(cli.main, [*words, "--url", store.url])
        assert answer.exit_code == 0, answer.output
    after = {info.path for info in store.list()}
    assert after - before
    for path in after:
        assert_no_canary(f"{path} {store.read(path)!r}")
