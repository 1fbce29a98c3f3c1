"""No page, launchpad or record of Dagster shows a secret: GraphQL and the database are searched."""

from __future__ import annotations

import asyncio
import inspect
import json
import sqlite3
import sys
import zlib
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import dagster as dg
import graphql
import pytest
from dagster._core.remote_origin import InProcessCodeLocationOrigin
from dagster._core.types.loadable_target_origin import LoadableTargetOrigin
from dagster._core.workspace.context import WorkspaceProcessContext
from dagster._core.workspace.load_target import InProcessWorkspaceLoadTarget
from dagster_graphql.schema import create_schema

from arroyo_dagster import redaction
from arroyo_dagster.orchestration import failures
from arroyo_dagster.state import MemoryStore
from arroyo_dagster.state.storage.remote import obstore_options
from tests.jobs import run_word_job
from tests.journeys.test_secrets import QUICK, SENT, echoing
from tests.orchestration.terminating import events_of
from tests.secrets import CANARY, assert_no_canary

LOCATION = "canaries"
REPOSITORY = {"repositoryName": "__repository__", "repositoryLocationName": LOCATION}
_DEPTH = 12
_ROUNDS = 4


@contextmanager
def served(instance: dg.DagsterInstance, definitions: Path) -> Iterator[Any]:
    """A request context over one code location, loaded in this process."""
    target = LoadableTargetOrigin(
        executable_path=sys.executable, python_file=str(definitions), attribute="defs"
    )
    origin = InProcessCodeLocationOrigin(loadable_target_origin=target, location_name=LOCATION)
    with WorkspaceProcessContext(instance, InProcessWorkspaceLoadTarget([origin])) as process:
        yield process.create_request_context()


def answers(
    context: Any, arguments: Mapping[str, Any], only: Collection[str] | None = None
) -> Iterator[tuple[str, str]]:
    """Ask every field of the query type, and in each every type below it once.

    Args:
        only: these fields of the query type; None: all.
        arguments: the value of each required argument, by its name; a field with another is not
            asked. The value of an optional one is given as `field.argument`.

    Yields:
        The field, and its answer as JSON, errors included.
    """
    schema = create_schema().graphql_schema
    assert schema.query_type is not None
    failing: set[tuple[str, str]] = set()
    for name in schema.query_type.fields:
        if only is not None and name not in only:
            continue
        root = _query(schema, name, arguments, failing)
        if root is not None:
            yield name, _asked(schema, context, root, failing)


def _asked(
    schema: graphql.GraphQLSchema, context: Any, root: _Node, failing: set[tuple[str, str]]
) -> str:
    async def ask() -> graphql.ExecutionResult:
        document = graphql.parse(f"{{ {root.text()} }}")
        found = graphql.execute(schema, document, context_value=context)
        return await found if inspect.isawaitable(found) else found  # type: ignore[return-value]

    told: list[Any] = []
    for _ in range(_ROUNDS):
        context.loaders.clear()
        answer = asyncio.run(ask())
        errors = answer.errors or []
        told += [answer.data, [f"{one} {one.original_error!r}" for one in errors]]
        # A field that fails takes all around it along: ask again without it.
        paths = [[part for part in one.path or () if isinstance(part, str)] for one in errors]
        dropped = {one for path in paths for one in root.drop(path)}
        failing |= dropped
        if not dropped:
            break
    return json.dumps(told, ensure_ascii=False, default=str)


def _query(
    schema: graphql.GraphQLSchema,
    name: str,
    arguments: Mapping[str, Any],
    failing: set[tuple[str, str]],
) -> _Node | None:
    """The field with all below it: each type once, where it is nearest."""
    assert schema.query_type is not None
    seen: set[str] = set()
    top = _called(name, schema.query_type.fields[name], arguments)
    if top is None:
        return None
    root = _Node(top, graphql.get_named_type(schema.query_type.fields[name].type))
    queue = deque([(root, 0)])
    while queue:
        node, depth = queue.popleft()
        for kind in _kinds(schema, node.kind):
            if kind.name in seen or depth > _DEPTH:
                continue
            seen.add(kind.name)
            for inner, field in kind.fields.items():
                called = _called(inner, field, arguments)
                if called is None or (kind.name, inner) in failing:
                    continue
                child = _Node(called, graphql.get_named_type(field.type))
                node.children.setdefault(kind.name, []).append(child)
                queue.append((child, depth + 1))
    return root


class _Node:
    def __init__(self, called: str, kind: Any) -> None:
        self.called = called
        self.name = called.partition("(")[0]
        self.kind = kind
        self.children: dict[str, list[_Node]] = {}

    def drop(self, path: list[str]) -> set[tuple[str, str]]:
        """Leave out the field at `path`, which begins with this one; its type and name."""
        dropped: set[tuple[str, str]] = set()
        for kind, children in self.children.items():
            for child in [one for one in children if [one.name] == path[1:2]]:
                if len(path) == 2:
                    children.remove(child)
                    dropped.add((kind, child.name))
                else:
                    dropped |= child.drop(path[1:])
        return dropped

    def text(self) -> str:
        if graphql.is_leaf_type(self.kind):
            return self.called
        inner = " ".join(
            f"... on {kind} {{ {' '.join(child.text() for child in children)} }}"
            for kind, children in self.children.items()
            if children
        )
        return f"{self.called} {{ __typename {inner} }}"


def _kinds(schema: graphql.GraphQLSchema, kind: Any) -> list[graphql.GraphQLObjectType]:
    if graphql.is_object_type(kind):
        return [kind]
    if graphql.is_abstract_type(kind):
        return list(schema.get_possible_types(kind))
    return []


def _called(name: str, field: Any, arguments: Mapping[str, Any]) -> str | None:
    given = {}
    for argument, kind in field.args.items():
        if f"{name}.{argument}" in arguments:
            given[argument] = arguments[f"{name}.{argument}"]
        elif graphql.is_required_argument(kind):
            if argument not in arguments:
                return None
            given[argument] = arguments[argument]
    if not given:
        return name
    return f"{name}({', '.join(f'{key}: {_literal(value)}' for key, value in given.items())})"


class Word(str):
    """A value of an enumeration."""


def _literal(value: Any) -> str:
    if isinstance(value, Word):
        return str.__str__(value)
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {_literal(one)}" for key, one in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_literal, value)) + "]"
    return json.dumps(value)


SECRETS = {
    "CANARY_S3": CANARY,
    "CANARY_SESSION": SENT,
    "CANARY_API": SENT,
    "CANARY_SPARK": CANARY,
    "CANARY_REMOTE": f"sc://somewhere:15002/;token={SENT}",
}
ASKED_JOBS = ("arroyo_verify", "arroyo_fleet", "arroyo_compaction")

# What showed secrets once, and what it shows now.
PAGES = {
    "topLevelResourceDetailsOrError": "CANARY_S3",
    "allTopLevelResourceDetailsOrError": "CANARY_S3",
    "resourcesOrError": "CANARY_S3",
    "runConfigSchemaOrError": "CANARY_S3",
    "pipelineSnapshotOrError": '"name": "arroyo_verify"',
    "runOrError": "eventConnection",
    "logsForRun": "arroyo_verify",
    "sensorOrError": "arroyo_checkpoint_sensor",
}

COMPONENT = """
import dagster as dg
from arroyo_dagster.orchestration.component import ArroyoStateComponent

defs = dg.build_defs_for_component(ArroyoStateComponent.resolve_from_yaml('''
checkpoint_url: {url}
storage_options:
  region: here
  access_key_id: somebody
  secret_access_key: {s3}
  client_kwargs: {{aws_session_token: {session}}}
mode: maintain
advanced: {{maintenance: {{engine: in-process}}}}
'''))
"""
PYTHON = """
import dagster as dg
from arroyo_dagster.orchestration import MaintenanceOptions, OrphansConfig
from arroyo_dagster.orchestration.definitions import ArroyoOptions, build_arroyo_definitions
from arroyo_dagster.orchestration.resources import ArroyoDirectory
from arroyo_dagster.orchestration.pipelines.model import ListedPipeline, PipelineList
from arroyo_dagster.orchestration.resources import ArroyoStateStore, SparkSessionResource

defs = build_arroyo_definitions(
    ArroyoStateStore(
        checkpoint_url="{url}",
        storage_options={{
            "region": "here",
            "access_key_id": "somebody",
            "secret_access_key": dg.EnvVar("CANARY_S3"),
            "session_token": dg.EnvVar("CANARY_SESSION"),
        }},
        arroyo_api_url="http://127.0.0.1:9",
        arroyo_api_token=dg.EnvVar("CANARY_API"),
    ),
    mode="maintain",
    pipelines=PipelineList(
        "s3://list", (ListedPipeline("words/main", ("words", "main"), managed=True),)
    ),
    options=ArroyoOptions(
        spark=SparkSessionResource(
            conf={{"spark.hadoop.fs.s3a.secret.key": dg.EnvVar("CANARY_SPARK")}},
            remote_url=dg.EnvVar("CANARY_REMOTE"),
        ),
        maintenance=MaintenanceOptions(orphans=OrphansConfig()),
    ),
)
"""


def _definitions(way: str, url: str) -> str:
    if way == "python":
        return PYTHON.format(url=url)
    if way == "template":
        names = {"s3": "'{{ env.CANARY_S3 }}'", "session": "\"{{ env('CANARY_SESSION') }}\""}
    else:
        names = {"s3": "{env: CANARY_S3}", "session": "{env: CANARY_SESSION}"}
    return COMPONENT.format(url=url, **names)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, retries_at_once: None) -> None:
    monkeypatch.setattr(redaction, "_KNOWN", set())
    monkeypatch.setattr(obstore_options, "patience_of", lambda options, url: QUICK)
    monkeypatch.setattr(failures, "MAX_RETRIES", 0)
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)


@pytest.fixture(scope="module")
def echo() -> Iterator[int]:
    with echoing() as port:
        yield port


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited")
@pytest.mark.parametrize(
    ("way", "situation", "only"),
    [
        ("template", "works", PAGES),
        pytest.param("env", "works", PAGES, marks=pytest.mark.soak),
        ("python", "echo", PAGES),
        pytest.param("python", "echo", None, marks=pytest.mark.soak),  # every field: 35 s
    ],
)
def test_graphql_and_the_database_hold_no_secret(
    way: str, situation: str, only: Any, echo: int, tmp_path: Path
) -> None:
    run_word_job(MemoryStore("secrets-of-graphql"), rows=8, sinks=0, keep_epochs=None)
    url = "memory://secrets-of-graphql"
    if situation == "echo":
        url = f"s3::http://127.0.0.1:{echo}/bucket/k"
    file = tmp_path / "canaries.py"
    file.write_text(_definitions(way, url))
    with (
        dg.instance_for_test(temp_dir=str(tmp_path)) as instance,
        served(instance, file) as context,
    ):
        arguments = _arguments(_ran(instance, file))
        told = dict(answers(context, arguments, only))
        for field, text in told.items():
            assert_no_canary(f"{field}: {text}")
        _assert_pages_are_there(told)
        assert only or sum(len(text) > 200 for text in told.values()) > 30
    for text in _stored(tmp_path):
        assert_no_canary(text)


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited")
def test_a_step_that_is_retried_tells_no_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failures, "MAX_RETRIES", 1)
    file = tmp_path / "canaries.py"
    with echoing(status=503) as port, dg.instance_for_test(temp_dir=str(tmp_path)) as instance:
        file.write_text(_definitions("python", f"s3::http://127.0.0.1:{port}/bucket/k"))
        run = _ran(instance, file, ["arroyo_orphans_gc"])
        assert {"STEP_UP_FOR_RETRY", "STEP_RESTARTED"} <= set(events_of(instance, run))
        with served(instance, file) as context:
            told = dict(answers(context, _arguments(run), ("logsForRun", "runOrError")))
    for text in (*told.values(), *_stored(tmp_path)):
        assert_no_canary(text)


def _ran(instance: dg.DagsterInstance, file: Path, jobs: Sequence[str] = ASKED_JOBS) -> str:
    """Run some jobs and ticks; the id of the run of the first job."""
    import runpy

    defs = runpy.run_path(str(file))["defs"]
    found = ""
    for name in jobs:
        job = defs.resolve_job_def(name)
        result = job.execute_in_process(instance=instance, raise_on_error=False)
        found = found or result.run_id
    return found


def _arguments(run_id: str) -> dict[str, Any]:
    job = {**REPOSITORY, "pipelineName": ASKED_JOBS[0], "jobName": ASKED_JOBS[0]}
    del job["jobName"]
    key = {"path": ["arroyo", "words", "main", "checkpoint"]}
    return {
        "repositorySelector": REPOSITORY,
        "repositoryID": "",
        "name": "canaries",
        "locationName": "canaries",
        "params": job,
        "pipeline": job,
        "pipelineSelector": job,
        "selector": job,
        "mode": "default",
        "pipelineName": ASKED_JOBS[0],
        "scheduleSelector": {**REPOSITORY, "scheduleName": "arroyo_verify_schedule"},
        "sensorSelector": {**REPOSITORY, "sensorName": "arroyo_checkpoint_sensor"},
        "instigationSelector": {**REPOSITORY, "name": "arroyo_checkpoint_sensor"},
        "resourceSelector": {**REPOSITORY, "resourceName": "arroyo_store"},
        "runId": run_id,
        "limit": 100,
        "view": Word("ROOTS"),
        "assetKey": key,
        "assetKeys": [key],
        "logKey": [run_id, "compute_logs", "arroyo_verify"],
        "pipelineSnapshotOrError.activePipelineSelector": job,
        "tags": [],
    }


def _assert_pages_are_there(told: dict[str, str]) -> None:
    """The pages that showed secrets once were really looked at, and name variables instead."""
    for field, text in PAGES.items():
        assert text in told[field], field


def _stored(folder: Path) -> Iterator[str]:
    """Every value of every database below `folder`, and every other file, as text."""
    found = 0
    for path in folder.rglob("*"):
        if path.name == "canaries.py" or not path.is_file():
            continue
        if path.suffix != ".db":
            yield path.read_bytes().decode(errors="replace")
            continue
        with sqlite3.connect(path) as database:
            tables = database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
            for (table,) in tables.fetchall():
                for row in database.execute(f'SELECT * FROM "{table}"'):
                    found += 1
                    yield " ".join(map(_text, row))
    assert found > 20


def _text(value: object) -> str:
    if not isinstance(value, bytes):
        return json.dumps(value, ensure_ascii=False, default=str)
    try:
        return zlib.decompress(value).decode(errors="replace")
    except zlib.error:
        return value.decode(errors="replace")
