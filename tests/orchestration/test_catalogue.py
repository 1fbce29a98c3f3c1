"""Every deployment and checkpoint URL has a catalogue of its own, and all hosts see the same."""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from dagster._core.launcher import DefaultRunLauncher

from arroyo_dagster.errors import FormatError, InputError
from arroyo_dagster.orchestration.catalog import location as places
from arroyo_dagster.orchestration.definitions import build_arroyo_definitions
from arroyo_dagster.orchestration.resources import ArroyoStateStore
from arroyo_dagster.state.model.layout import JobPaths
from arroyo_dagster.state.operations.catalog.epochs import (
    RefreshOptions,
    read_history,
    refresh,
)
from arroyo_dagster.state.operations.catalog.owner import OWNER, checkpoint_place
from arroyo_dagster.state.storage import open_store
from tests.fleets import Written, protocol_job
from tests.secrets import CANARY, assert_no_canary

ONE = protocol_job("words")
TWO = protocol_job("others")
KEY = "words/main"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    found = tmp_path / "home"
    found.mkdir()
    monkeypatch.setenv("DAGSTER_HOME", str(found))
    return found


def _written(folder: Path, epochs: int, *jobs: JobPaths) -> str:
    for paths in jobs or (ONE,):
        Written(open_store(str(folder)), paths).epochs(epochs)
    return str(folder)


def _refreshed(store: ArroyoStateStore, paths: JobPaths = ONE) -> list[int]:
    """Refresh a job as the asset does; the epochs its catalogue knows, expired ones too."""
    refresh(store.reading(), store.catalogue(), paths, RefreshOptions(earlier=store.earlier()))
    return [row.epoch for row in read_history(store.catalogue(), paths).epochs]


# ---- one catalogue for each deployment and checkpoint URL ----------------------------------------


def test_two_deployments_with_one_home_keep_their_own_rows(home: Path, tmp_path: Path) -> None:
    urls = {name: _written(tmp_path / name, n) for name, n in {"prod": 5, "staging": 2}.items()}
    for _ in range(2):
        for name, url in urls.items():
            defs = build_arroyo_definitions(url, deployment=name)
            job = defs.resolve_job_def(f"arroyo_{name}_refresh")
            instance = dg.DagsterInstance.ephemeral()
            instance.add_dynamic_partitions(f"arroyo_{name}_jobs", [KEY])
            assert job.execute_in_process(instance=instance, partition_key=KEY).success
    stores = {
        name: ArroyoStateStore(checkpoint_url=url, deployment=name) for name, url in urls.items()
    }
    for name, store in stores.items():
        rows = read_history(store.catalogue(), ONE).epochs
        assert [row.epoch for row in rows] == list(range(1, 6 if name == "prod" else 3))
        assert all(row.present for row in rows)
        assert f"/deployments/{name}/" in store.catalogue().url


def test_a_catalogue_of_another_url_is_refused_with_both_urls(tmp_path: Path) -> None:
    shared = str(tmp_path / "catalogue")
    ArroyoStateStore(checkpoint_url="memory://prod", catalogue_url=shared).catalogue()
    other = ArroyoStateStore(checkpoint_url="memory://staging", catalogue_url=shared)
    with pytest.raises(InputError, match="to another checkpoint URL") as refused:
        other.catalogue()
    assert "memory://prod" in str(refused.value)
    assert "memory://staging" in str(refused.value)
    ArroyoStateStore(checkpoint_url="memory://prod", catalogue_url=shared).catalogue()
    (tmp_path / "catalogue" / OWNER).write_text("[]")
    with pytest.raises(FormatError, match="does not name its checkpoint URL"):
        other.catalogue()


@pytest.mark.parametrize("endpoint", ["endpoint", "AWS_ENDPOINT_URL"])
def test_a_place_is_told_by_its_endpoint_and_holds_no_credentials(
    endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = {"access_key_id": "A", "secret_access_key": CANARY}
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", CANARY)

    def place(url: str, where: str | None = None) -> str:
        monkeypatch.delenv("AWS_ENDPOINT_URL", raising=False)
        if where and endpoint.isupper():
            monkeypatch.setenv(endpoint, where)
        options = {endpoint: where} if where and endpoint.islower() else {}
        return checkpoint_place(url, {**keys, **options})

    found = place("s3://bucket/key", "http://one:9000")
    assert found == "s3://bucket/key at http://one:9000"
    assert place("s3://bucket/key", "http://one:9000/") == found
    assert place("s3://bucket/key", "http://two:9000") != found
    assert place("s3::http://one:9000/bucket/key") != place("s3::http://two:9000/bucket/key")
    regional = "https://s3.eu-central-1.amazonaws.com/bucket/key"
    assert place(regional) == place("s3://bucket/key")
    assert_no_canary(found)


# ---- the catalogue of an older release -----------------------------------------------------------


def _old_catalogue(home: Path, url: str, *jobs: JobPaths) -> Path:
    """Rows as older releases kept them: one directory for every URL, which it does not name."""
    root = home / places.CATALOGUE_DIRECTORY
    for paths in jobs or (ONE,):
        refresh(open_store(url), open_store(str(root)), paths)
    return root


def test_an_old_catalogue_of_two_urls_gives_each_its_own_rows(home: Path, tmp_path: Path) -> None:
    prod = _written(tmp_path / "prod", 4, ONE, TWO)
    staging = _written(tmp_path / "staging", 4, ONE, TWO)
    _old_catalogue(home, prod, ONE)
    _old_catalogue(home, staging, TWO)  # the last one that wrote counts
    for url, paths in ((prod, ONE), (staging, TWO)):
        (Path(url) / paths.epoch_record(1)).unlink()  # type: ignore[arg-type]
        (Path(staging if url == prod else prod) / paths.epoch_record(1)).unlink()  # type: ignore[arg-type]
    stores = {url: ArroyoStateStore(checkpoint_url=url) for url in (prod, staging)}
    assert _refreshed(stores[prod], ONE) == [1, 2, 3, 4]
    assert _refreshed(stores[staging], ONE) == [2, 3, 4]
    assert _refreshed(stores[prod], TWO) == [2, 3, 4]
    assert _refreshed(stores[staging], TWO) == [1, 2, 3, 4]


# ---- two hosts -----------------------------------------------------------------------------------


class RunsElsewhere(DefaultRunLauncher):
    """A run launcher of another package, as those of Kubernetes and Docker."""


@contextmanager
def _instance(folder: Path, *, remote: bool = True) -> Iterator[dg.DagsterInstance]:
    launcher = {"run_launcher": {"module": __name__, "class": "RunsElsewhere"}}
    folder.mkdir(exist_ok=True)
    with dg.instance_for_test(overrides=launcher if remote else {}, temp_dir=str(folder)) as found:
        found.add_dynamic_partitions("arroyo_jobs", [KEY])
        yield found


def _run(store: ArroyoStateStore, instance: dg.DagsterInstance, job: str = "arroyo_refresh") -> Any:
    """A run; the description of the failure of its step, or None."""
    found = build_arroyo_definitions(store).resolve_job_def(job)
    key = KEY if found.partitions_def is not None else None
    result = found.execute_in_process(instance=instance, partition_key=key, raise_on_error=False)
    if result.success:
        return None
    events = [event for event in result.all_events if event.is_step_failure]
    failure = events[0].step_failure_data.user_failure_data
    assert failure is not None
    return failure.description


def _tick(store: ArroyoStateStore, instance: dg.DagsterInstance) -> None:
    defs = build_arroyo_definitions(store)
    sensor = defs.resolve_sensor_def("arroyo_checkpoint_sensor")
    with dg.build_sensor_context(
        instance_ref=instance.get_ref(), definitions=defs, resources={"arroyo_store": store}
    ) as context:
        sensor.evaluate_tick(context)


def _schedule(store: ArroyoStateStore, instance: dg.DagsterInstance) -> None:
    repository = build_arroyo_definitions(store).get_repository_def()
    with dg.build_schedule_context(
        instance_ref=instance.get_ref(),
        repository_def=repository,
        resources={"arroyo_store": store},
        scheduled_execution_time=dt.datetime.now(dt.UTC),
    ) as context:
        repository.get_schedule_def("arroyo_refresh_schedule").evaluate_tick(context)


def _causes(error: BaseException | None) -> Iterator[str]:
    while error is not None:
        yield str(error)
        error = error.__cause__


@pytest.mark.parametrize("way", ["run", "fleet", "sensor", "schedule"])
def test_with_another_run_launcher_a_catalogue_url_is_required(way: str, tmp_path: Path) -> None:
    url = _written(tmp_path / "jobs", 2)
    before = sorted(Path(url).rglob("*"))
    store = ArroyoStateStore(checkpoint_url=url)
    with _instance(tmp_path / "home") as instance:
        if way in ("run", "fleet"):
            job = "arroyo_refresh" if way == "run" else "arroyo_fleet"
            line = _run(store, instance, job)
        else:
            with pytest.raises(Exception, match="") as refused:
                (_tick if way == "sensor" else _schedule)(store, instance)
            line = next(text for text in _causes(refused.value) if "catalogue_url" in text)
    # The run of one job names it first, as every failure of a partition does.
    named = f"{KEY}: " if way == "run" else ""
    assert line.startswith(f"{named}catalogue_url is required: with RunsElsewhere")
    assert "\n" not in line
    assert sorted(Path(url).rglob("*")) == before
    assert not list(tmp_path.rglob(str(OWNER)))


def test_a_run_on_a_host_without_the_catalogue_of_the_code_server_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = _written(tmp_path / "jobs", 2)
    store = ArroyoStateStore(checkpoint_url=url, catalogue_url=dg.EnvVar("CATALOGUE"))
    for tick in (_tick, _schedule):
        with _instance(tmp_path / f"home-{tick.__name__}") as instance:
            monkeypatch.setenv("CATALOGUE", str(tmp_path / f"disk-of-the-server-{tick.__name__}"))
            tick(store, instance)
            assert _run(store, instance) is None
            # The pod has the path, and another disk behind it.
            monkeypatch.setenv("CATALOGUE", str(tmp_path / f"disk-of-the-pod-{tick.__name__}"))
            line = _run(store, instance)
            said = "this run does not see the catalogue that the code server"
            assert line.startswith(f"{KEY}: {said}")
            assert "disk-of-the-server" in line
            assert "disk-of-the-pod" in line
            assert "\n" not in line
            # Nor is one believed that was begun by another.
            ArroyoStateStore(
                checkpoint_url=url, catalogue_url=str(tmp_path / f"disk-of-the-pod-{tick.__name__}")
            ).catalogue()
            assert _run(store, instance) == line
            tick(store, instance)
            assert _run(store, instance) is None
    assert not list(Path(url).rglob(str(OWNER)))


def test_what_the_code_server_said_long_ago_is_no_proof(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = _written(tmp_path / "jobs", 2)
    with _instance(tmp_path / "home") as instance:
        _tick(ArroyoStateStore(checkpoint_url=url, catalogue_url=str(tmp_path / "a")), instance)
        other = ArroyoStateStore(checkpoint_url=url, catalogue_url=str(tmp_path / "b"))
        assert _run(other, instance) is not None
        now = places.time.time()
        monkeypatch.setattr(places.time, "time", lambda: now + places.CATALOGUE_TTL_SECONDS + 1)
        assert _run(other, instance) is None


def test_on_one_host_nothing_is_required_and_nothing_written_to_the_instance(
    tmp_path: Path,
) -> None:
    url = _written(tmp_path / "jobs", 2)
    store = ArroyoStateStore(checkpoint_url=url)
    with _instance(tmp_path / "home", remote=False) as instance:
        _tick(store, instance)
        assert _run(store, instance) is None
        key = places._key(checkpoint_place(url, {}))
        assert instance.daemon_cursor_storage.get_cursor_values({key}) == {}
    owner = json.loads(next(tmp_path.rglob(str(OWNER))).read_text())
    assert owner["checkpoint_url"] == f"file://{url}"
