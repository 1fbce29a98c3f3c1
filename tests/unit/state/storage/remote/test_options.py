"""Options and environment, in the words of each client."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from arroyo_dagster.errors import InputError
from arroyo_dagster.state.storage.failures import understood
from arroyo_dagster.state.storage.remote.credentials import resolved
from arroyo_dagster.state.storage.remote.obstore_options import obstore_options
from arroyo_dagster.state.storage.remote.options import normalised
from arroyo_dagster.state.storage.remote.s3_store import adlfs_options, gcsfs_options
from tests.stores import parse_url

S3 = parse_url("s3://bucket/key")
R2 = parse_url("r2://acct@bucket/key")
GS = parse_url("gs://bucket/key")
AZURE = parse_url("abfss://box@acct.dfs.core.windows.net/k")
KEYS = {"access_key_id": "id", "secret_access_key": "hunter2"}


@pytest.fixture(autouse=True)
def empty_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in list(os.environ):
        if name.startswith(("AWS_", "R2_", "CLOUDFLARE_", "GOOGLE_", "AZURE_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")


def test_names_of_every_ecosystem_are_understood() -> None:
    given = {"aws_access_key_id": "a", "AWS_SECRET_ACCESS_KEY": "b", "token": "c", "anon": True}
    assert normalised(given, "s3") == {
        "access_key_id": "a",
        "secret_access_key": "b",
        "session_token": "c",
        "skip_signature": True,
    }
    assert normalised({"azure_storage_account_key": "k"}, "azure") == {"account_key": "k"}
    assert normalised({"token": "t.json"}, "gs") == {"token": "t.json"}
    with pytest.raises(InputError, match="given twice"):
        normalised({"key": "a", "access_key_id": "b"}, "s3")


def test_url_wins_over_options_over_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT", "http://environment:1")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "environment")
    assert resolved(S3, {}) == {"endpoint": "http://environment:1", "region": "environment"}
    assert resolved(S3, {"region": "option"})["region"] == "option"
    url = parse_url("s3::http://url:2/bucket")
    assert resolved(url, {"endpoint": "http://option:3"})["endpoint"] == "http://url:2"
    found = obstore_options(url, KEYS)
    assert found.config["aws_endpoint_url_s3"] == found.config["endpoint"] == "http://url:2"


def test_given_keys_never_mix_with_environment_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SESSION_TOKEN", "of somebody else")
    monkeypatch.setenv("R2_ACCESS_KEY_ID", "of somebody else")
    for url in (S3, R2):
        provider = obstore_options(url, KEYS).provider
        assert provider is not None
        assert {**provider(), "expires_at": None} == {**KEYS, "token": None, "expires_at": None}


def test_a_profile_of_the_aws_tools_is_found(tmp_path: Path) -> None:
    (tmp_path / ".aws").mkdir()
    (tmp_path / ".aws" / "credentials").write_text(
        "[other]\naws_access_key_id = file\naws_secret_access_key = s\n"
    )
    (tmp_path / ".aws" / "config").write_text("[profile other]\nregion = eu-west-3\n")
    found = obstore_options(S3, {"profile": "other"})
    assert found.provider is not None
    keys = found.provider()
    assert (keys["access_key_id"], found.config["region"]) == ("file", "eu-west-3")
    assert keys["expires_at"] is not None


def test_azure_account_unlike_the_environment_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "k")
    assert resolved(AZURE, {}) == {"account_name": "acct", "account_key": "k"}
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "other")
    with pytest.raises(InputError, match=r"'acct'.*'other'"):
        resolved(AZURE, {})
    assert resolved(AZURE, {"account_name": "acct"})["account_name"] == "acct"
    emulator = {"endpoint": "http://127.0.0.1:1/acct", "account_name": "acct"}
    assert (
        "BlobEndpoint=http://127.0.0.1:1/acct"
        in adlfs_options(AZURE, emulator)["connection_string"]
    )


def test_a_key_of_google_is_json_and_stays_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT_KEY", '{"type": "service_account"}')
    assert gcsfs_options(GS, {})["token"] == {"type": "service_account"}
    assert obstore_options(GS, {}).config == {"service_account_key": '{"type": "service_account"}'}
    assert gcsfs_options(GS, {"skip_signature": "true"})["token"] == "anon"
    with pytest.raises(InputError, match="not JSON") as caught:
        gcsfs_options(GS, {"service_account_key": "hunter2"})
    assert "hunter2" not in str(caught.value)
    with pytest.raises(InputError, match="bearer"):
        gcsfs_options(GS, {"bearer_token": "hunter2"})


def test_secrets_in_texts_of_libraries_are_not_repeated() -> None:
    text = "GET https://h/b?sv=1&sig=hunter2 and /tokeninfo?access_token=hunter2 failed"
    reason = understood(RuntimeError(text)).reason
    assert "hunter2" not in reason
    assert "https://h/b?***" in reason
