"""docs/operate/permissions.md: each policy allows what a feature asks of S3, and nothing more."""

from __future__ import annotations

import fnmatch
import io
import json
import re
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import parse_qs

import pytest
from click.testing import CliRunner

from arroyo_dagster import cli
from arroyo_dagster.state import open_store
from tests.contract import servers
from tests.documentation import PROJECT
from tests.jobs import run_word_job

PAGE = PROJECT / "docs" / "operate" / "permissions.md"
ROOT = "checkpoints"
BUCKET = "bucket"
KEYS = {"access_key_id": "testing", "secret_access_key": "testing", "region": "us-east-1"}
MULTIPART = {"s3:AbortMultipartUpload"}
"""Only asked for when the upload of a large object fails."""

Requests = set[tuple[str, str]]

FEATURES = {
    "View": (
        "jobs",
        "epochs JOB",
        "show JOB",
        "rows JOB count counts",
        "verify JOB",
        "sql @pins JOB",
        "sql @leases",
        "compact plan",
        "compact plan JOB",
        "gc plan expire JOB --keep 3",
        "sql @journal JOB",
        "doctor --read-only",
    ),
    "Compact": ("compact run JOB --yes",),
    "Collect garbage": (
        "pin JOB 12",
        "unpin JOB 12",
        "gc run expire JOB --keep 8 --quarantine --yes",
        "gc purge JOB --yes",
        "gc run expire JOB --keep 4 --yes",
        "gc run orphans JOB --yes",
        "doctor",
    ),
}
"""Features, as the headings of the page name them, and their commands, in this order."""


class Requested:
    """A server of S3 that records the actions that each request needs, as IAM names them."""

    def __init__(self, app: Callable[..., Any]) -> None:
        self.app = app
        self.actions: Requests = set()

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Any:
        _, _, key = environ["PATH_INFO"].lstrip("/").partition("/")
        method, query = environ["REQUEST_METHOD"], environ.get("QUERY_STRING", "")
        if method == "POST" and query.startswith("delete"):
            environ = self._bulk_delete(environ)
        elif method == "DELETE":
            action = "s3:AbortMultipartUpload" if "uploadId" in query else "s3:DeleteObject"
            self.actions.add((action, key))
        elif method in ("PUT", "POST"):
            self.actions.add(("s3:PutObject", key))
            if source := environ.get("HTTP_X_AMZ_COPY_SOURCE"):
                self.actions.add(("s3:GetObject", source.lstrip("/").partition("/")[2]))
        else:
            prefix = parse_qs(query).get("prefix", [""])[0]
            self.actions.add(("s3:GetObject", key) if key else ("s3:ListBucket", prefix))
        return self.app(environ, start_response)

    def _bulk_delete(self, environ: dict[str, Any]) -> dict[str, Any]:
        body = environ["wsgi.input"].read(int(environ["CONTENT_LENGTH"]))
        for key in re.findall(rb"<Key>([^<]+)</Key>", body):
            self.actions.add(("s3:DeleteObject", key.decode()))
        return {**environ, "wsgi.input": io.BytesIO(body)}


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[str, Requested]]:
    made: list[Requested] = []

    def dialect(app: Callable[..., Any]) -> Requested:
        made.append(Requested(app))
        return made[0]

    with servers.moto_server(dialect) as host:
        servers.make_moto_bucket(BUCKET)
        store = open_store(f"s3::http://{host}/{BUCKET}/{ROOT}", options=KEYS)
        run_word_job(store, rows=24, rows_per_epoch=2, keep_epochs=None, parallelism=1)
        yield host, made[0]


@pytest.fixture
def url(server: tuple[str, Requested], monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    return f"s3::http://{server[0]}/{BUCKET}/{ROOT}"


def policy(feature: str) -> list[dict[str, Any]]:
    """The statements of the policy below the heading of a feature."""
    section = PAGE.read_text().split(f"\n## {feature}\n")[1].split("\n## ")[0]
    (text,) = re.findall(r"```json\n(.*?)```", section, re.DOTALL)
    document = json.loads(text)
    assert document["Version"] == "2012-10-17"
    return list(document["Statement"])


def allows(statement: dict[str, Any], action: str, key: str) -> bool:
    """Whether a statement allows an action on an object, or the listing of a prefix."""
    assert statement["Effect"] == "Allow"
    if action not in statement["Action"]:
        return False
    if action == "s3:ListBucket":
        prefixes = statement["Condition"]["StringLike"]["s3:prefix"]
        fits = any(fnmatch.fnmatchcase(key, pattern) for pattern in prefixes)
        return fits and statement["Resource"] == [f"arn:aws:s3:::{BUCKET}"]
    resource = f"arn:aws:s3:::{BUCKET}/{key}"
    return any(fnmatch.fnmatchcase(resource, pattern) for pattern in statement["Resource"])


def run(command: str, url: str) -> None:
    args = command.replace("JOB", "words/main").split()
    result = CliRunner().invoke(cli.main, args, env={"ARROYO__CHECKPOINT_URL": url})
    assert result.exit_code == 0, f"{command}: {result.output} {result.stderr}"


@pytest.mark.parametrize("feature", FEATURES)
def test_a_policy_allows_what_its_feature_asks_and_nothing_more(
    feature: str, url: str, server: tuple[str, Requested]
) -> None:
    server[1].actions.clear()
    for command in FEATURES[feature]:
        run(command, url)
    statements = policy(feature)
    used = set()
    for action, key in sorted(server[1].actions):
        allowing = [n for n, one in enumerate(statements) if allows(one, action, key)]
        assert allowing, f"{feature}: {action} on {key} is not allowed"
        used |= {(n, action) for n in allowing}
    granted = {(n, action) for n, one in enumerate(statements) for action in one["Action"]}
    assert {action for n, action in granted - used} <= MULTIPART, "more than the feature needs"


def test_a_policy_without_a_right_is_found_out() -> None:
    view = policy("View")
    assert any(allows(one, "s3:GetObject", f"{ROOT}/words/main/file") for one in view)
    assert not any(allows(one, "s3:PutObject", f"{ROOT}/words/main/file") for one in view)
    assert not any(allows(one, "s3:GetObject", "elsewhere/file") for one in view)
    collect = policy("Collect garbage")
    assert not any(allows(one, "s3:PutObject", f"{ROOT}/words/main/file") for one in collect)
