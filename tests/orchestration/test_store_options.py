"""Options of stores name environment variables, which are looked up where a store is opened."""

from __future__ import annotations

import traceback
from typing import Any

import dagster as dg
import pytest
from dagster._core.definitions.definitions_load_context import (
    DefinitionsLoadContext,
    DefinitionsLoadType,
)
from dagster.components.testing import create_defs_folder_sandbox

from arroyo_dagster.errors import InputError
from arroyo_dagster.orchestration import (
    ArroyoDirectory,
    ArroyoOptions,
    ArroyoStateComponent,
    ArroyoStateStore,
    SparkSessionResource,
    build_arroyo_definitions,
)
from arroyo_dagster.orchestration.secrets import NamedSecrets
from arroyo_dagster.state import MemoryStore
from arroyo_dagster.state.storage.remote import open as opening
from tests.fleets import Written, protocol_job
from tests.secrets import CANARY, assert_no_canary

Opened = list[dict[str, Any]]


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Opened:
    """The options that clients of stores are opened with, in order; no store refuses any."""
    found: Opened = []
    real = opening.open_store

    def open_it(url: str, *, options: Any = None, **rest: Any) -> Any:
        found.append(dict(options or {}))
        return real(url, **rest)

    monkeypatch.setattr(opening, "open_store", open_it)
    return found


def _store(name: str, **options: Any) -> ArroyoStateStore:
    Written(MemoryStore(name), protocol_job("words")).epochs(2)
    return ArroyoStateStore(checkpoint_url=f"memory://{name}", storage_options=options)


OPTIONS = {
    "secret_access_key": dg.EnvVar("STORE_SECRET"),
    "max_retries": dg.EnvVar.int("STORE_RETRIES"),
    "client_kwargs": {"aws_session_token": dg.EnvVar("STORE_SECRET")},
    "request_timeout_seconds": 7,
    "skip_signature": True,
}
WANTED = OPTIONS | {
    "secret_access_key": "hidden-enough",
    "max_retries": "3",
    "client_kwargs": {"aws_session_token": "hidden-enough"},
}


def test_variables_reach_the_client_in_a_run_in_a_sensor_and_in_a_schedule(
    opened: Opened, monkeypatch: pytest.MonkeyPatch, instance: dg.DagsterInstance
) -> None:
    store = _store("options-of-a-run", **OPTIONS)
    defs = build_arroyo_definitions(store)  # before the variables are set: nothing is listed
    monkeypatch.setenv("STORE_SECRET", "hidden-enough")
    monkeypatch.setenv("STORE_RETRIES", "3")
    repository = defs.get_repository_def()
    opened.clear()

    assert defs.resolve_job_def("arroyo_verify").execute_in_process(instance=instance).success
    assert WANTED in opened
    opened.clear()
    sensor = defs.resolve_sensor_def("arroyo_checkpoint_sensor")
    with dg.build_sensor_context(
        instance=instance, definitions=defs, resources=defs.resources
    ) as sensed:
        sensor.evaluate_tick(sensed)
    assert WANTED in opened
    opened.clear()
    schedule = repository.get_schedule_def("arroyo_verify_schedule")
    with dg.build_schedule_context(
        instance=instance, repository_def=repository, resources=defs.resources
    ) as due:
        schedule.evaluate_tick(due)
    assert WANTED in opened


def test_a_variable_that_is_not_set_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NOT_SET", raising=False)
    store = _store("options-not-set", secret_access_key=dg.EnvVar("NOT_SET"))
    with pytest.raises(InputError, match=r"NOT_SET, which storage_options\.secret_access_key"):
        store.reading()


# ---- what may not be in a field ------------------------------------------------------------------

REFUSED: list[tuple[str, Any]] = [
    ("storage_options.secret_access_key", {"storage_options": {"secret_access_key": CANARY}}),
    ("storage_options.AWS_SESSION_TOKEN", {"storage_options": {"AWS_SESSION_TOKEN": CANARY}}),
    ("storage_options.sas_key", {"storage_options": {"sas_key": CANARY}}),
    (
        "storage_options.client_kwargs.aws_secret_access_key",
        {"storage_options": {"client_kwargs": {"aws_secret_access_key": CANARY}}},
    ),
    ("storage_options.endpoint", {"storage_options": {"endpoint": "http://u:KNRsecret@h:9"}}),
    ("delete_options.account_key", {"delete_options": {"account_key": CANARY}}),
    ("arroyo_api_token", {"arroyo_api_token": CANARY}),
    ("arroyo_api_url", {"arroyo_api_url": "http://user:KNRsecret@127.0.0.1:5115"}),
    ("arroyo_database", {"arroyo_database": "postgresql://arroyo:KNRsecret@host/arroyo"}),
    ("arroyo_database", {"arroyo_database": "/x/state.sqlite?key=KNRsecret"}),
    ("checkpoint_url", {"checkpoint_url": "https://user:KNRsecret@host/bucket"}),
]


@pytest.mark.parametrize(("field", "given"), REFUSED)
def test_a_secret_in_clear_text_is_refused_in_one_line(field: str, given: dict[str, Any]) -> None:
    store = ArroyoStateStore(**{"checkpoint_url": "memory://x", **given})
    with pytest.raises(InputError) as refused:
        build_arroyo_definitions(store).get_repository_def()
    line = str(refused.value)
    assert field in line
    assert "dg.EnvVar" in line
    assert "\n" not in line
    assert_no_canary(line)


@pytest.mark.parametrize(
    "resource",
    [
        SparkSessionResource(conf={"spark.hadoop.fs.s3a.secret.key": CANARY}),
        SparkSessionResource(conf={"spark.driver.extraJavaOptions": "-DtrustStorePassword=KNRx"}),
        SparkSessionResource(remote_url="sc://host:15002/;token=KNRsecret"),
        ArroyoStateStore(checkpoint_url="s3://bucket/k", arroyo_api_token=CANARY),
    ],
)
def test_other_resources_refuse_secrets_as_well(resource: Any) -> None:
    with pytest.raises(InputError, match=r"dg\.EnvVar") as refused:
        resource.get_resource_definition()
    assert_no_canary(str(refused.value))


def test_what_is_no_secret_is_not_refused() -> None:
    options = {
        "region": "eu-central-1",
        "endpoint": "http://minio:9000",
        "access_key_id": "AKIAEXAMPLE",
        "profile": "production",
        "service_account": "/run/key.json",
        "skip_signature": "true",
        "max_retries": 3,
        "config_kwargs": {"signature_version": "s3v4", "max_pool_connections": 5},
        "token": "anon",
    }
    store = ArroyoStateStore(
        checkpoint_url="abfss://state@account.dfs.core.windows.net/key",
        storage_options=options,
        arroyo_database="/var/lib/arroyo/state.sqlite",
    )
    NamedSecrets.check_fields(store)
    conf = {
        "spark.hadoop.fs.s3a.aws.credentials.provider": "com.amazonaws.auth.ProfileProvider",
        "spark.io.encryption.keySizeBits": "256",
        "spark.hadoop.fs.s3a.access.key": dg.EnvVar("KEY"),
    }
    SparkSessionResource(master="k8s://https://host:443", conf=conf).get_resource_definition()
    ArroyoDirectory(assume={"pipeline/token_orders": "stopped"}).get_resource_definition()


@pytest.mark.parametrize("field", ["storage_options", "delete_options"])
def test_an_option_that_no_client_knows_is_found_when_definitions_load(
    field: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opening, "open_store", None)
    options: dict[str, Any] = {"regoin": "here", "secret_access_key": dg.EnvVar("NOT_SET")}
    store = ArroyoStateStore(checkpoint_url="s3://bucket/key", **{field: options})
    with pytest.raises(InputError, match="obstore has no such option: regoin") as refused:
        build_arroyo_definitions(store).get_repository_def()
    assert refused.value.facts["field"] == field
    assert refused.value.next_step == "did you mean region?"


def test_secrets_of_resources_within_resources_are_names_as_well(
    monkeypatch: pytest.MonkeyPatch, instance: dg.DagsterInstance
) -> None:
    """Dagster makes the definition of a runner again, with the values that its session has."""
    monkeypatch.setenv("SPARK_SECRET", CANARY)
    session = SparkSessionResource(conf={"fs.s3a.secret.key": dg.EnvVar("SPARK_SECRET")})
    defs = build_arroyo_definitions(_store("options-nested"), options=ArroyoOptions(spark=session))
    assert defs.resolve_job_def("arroyo_fleet").execute_in_process(instance=instance).success


def test_fields_for_the_launchpad_hold_no_secret_either() -> None:
    with pytest.raises(InputError, match=r"storage_options\.secret_access_key"):
        ArroyoStateStore.configure_at_launch(storage_options={"secret_access_key": CANARY})
    ArroyoStateStore.configure_at_launch(layout="legacy")


def test_a_run_that_was_given_a_secret_in_the_launchpad_fails_and_says_so() -> None:
    defs = build_arroyo_definitions(_store("options-typed", region="here"))
    for options, fails in (({"token": "KNRtyped"}, True), ({"token": {"env": "HOME"}}, False)):
        config = {"checkpoint_url": "memory://options-typed", "storage_options": options}
        result = defs.resolve_job_def("arroyo_fleet").execute_in_process(
            instance=dg.DagsterInstance.ephemeral(),
            run_config={"resources": {"arroyo_store": {"config": config}}},
            raise_on_error=False,
        )
        assert result.success is not fails
        if fails:
            failure = result.filter_events(lambda event: event.is_step_failure)[0]
            assert "the configuration of this run: storage_options.token must name" in str(
                failure.step_failure_data.user_failure_data
            )


# ---- the component -------------------------------------------------------------------------------


def of_yaml(attributes: dict[str, Any]) -> dg.Definitions:
    """The definitions of a component, as a code server that starts loads them."""
    given = {"type": "arroyo_dagster.ArroyoStateComponent"}
    given["attributes"] = {"checkpoint_url": "memory://of-yaml", **attributes}  # type: ignore[assignment]
    starts = DefinitionsLoadContext(DefinitionsLoadType.INITIALIZATION)
    with create_defs_folder_sandbox() as sandbox, DefinitionsLoadContext.scoped(starts):
        sandbox.scaffold_component(ArroyoStateComponent, defs_yaml_contents=given)
        with sandbox.build_all_defs() as defs:
            defs.get_repository_def()
            return defs


def test_yaml_names_variables_in_three_ways(
    monkeypatch: pytest.MonkeyPatch, opened: Opened
) -> None:
    for number in (1, 2, 3):
        monkeypatch.setenv(f"KEY_{number}", f"{number}{number}")
    defs = of_yaml(
        {
            "storage_options": {
                "secret_access_key": {"env": "KEY_1"},
                "session_token": "{{ env.KEY_2 }}",
                "client_kwargs": {"aws_session_token": "{{ env('KEY_3') }}"},
                "region": "{{ 'eu' }}-central-1",
                "max_retries": 3,
            },
            "delete_options": {"secret": "{{ env.KEY_1 }}"},
            "arroyo_api_token": {"env": "KEY_2"},
            "arroyo_database": "{{ env.KEY_3 }}",
        }
    )
    opened.clear()  # the listing has opened it as well
    with dg.build_resources({"store": defs.resources["arroyo_store"]}) as built:  # type: ignore[index]
        built.store.writable()
        assert built.store.arroyo_api_token == "22"
        assert built.store.arroyo_database == "33"
    assert opened == [
        {
            "secret_access_key": "11",
            "session_token": "22",
            "client_kwargs": {"aws_session_token": "33"},
            "region": "eu-central-1",
            "max_retries": 3,
        }
    ]


@pytest.mark.parametrize(
    "key", ["KNRliteral", "{{ 'KNRlit' ~ 'eral' }}", "{{ env('NO', 'KNRx') }}"]
)
def test_a_secret_that_stands_in_the_yaml_is_refused(key: str) -> None:
    with pytest.raises(Exception) as refused:
        of_yaml({"storage_options": {"secret_access_key": key}})
    # Dagster shows the whole traceback on the page of the code location.
    text = "".join(traceback.format_exception(refused.value))
    assert "{env: NAME}" in text
    assert_no_canary(text)
