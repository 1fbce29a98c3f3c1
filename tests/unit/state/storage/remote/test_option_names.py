"""An option that no client knows is refused with the nearest known name, without a connection."""

from __future__ import annotations

import pytest

from arroyo_dagster.errors import InputError
from arroyo_dagster.state.storage import open_store
from arroyo_dagster.state.storage.remote.option_names import check_option_names
from arroyo_dagster.state.storage.urls import parse_url

S3, GS, AZURE = "s3://b/k", "gs://b/k", "abfss://c@a.dfs.core.windows.net/k"
DOCUMENTED = {
    S3: ("access_key_id", "secret_access_key", "session_token", "profile", "region", "token"),
    "r2://account@b/k": ("access_key_id", "account", "region"),
    GS: ("service_account_key", "service_account", "bearer_token", "google_service_account"),
    AZURE: ("account_name", "account_key", "sas_key", "client_id", "client_secret", "tenant_id"),
}
FOR_ALL = ("skip_signature", "endpoint", "max_retries", "connect_timeout_seconds", "anon")


@pytest.mark.parametrize("client", ["obstore", "fsspec"])
@pytest.mark.parametrize("url", DOCUMENTED)
def test_documented_names_are_known(url: str, client: str) -> None:
    options = dict.fromkeys((*DOCUMENTED[url], *FOR_ALL))
    for name in options:
        check_option_names(parse_url(url), {name: None, "client": client})


@pytest.mark.parametrize(
    ("url", "client", "given", "close"),
    [
        (S3, "obstore", "acces_key_id", "access_key_id"),
        (S3, "obstore", "AWS_REGOIN", "region"),
        (S3, "obstore", "requester_pays", None),
        (S3, "obstore", "account_name", None),
        (GS, "obstore", "service_acount", "service_account"),
        (AZURE, "obstore", "acount_name", "account_name"),
        (S3, "fsspec", "requester_pay", "requester_pays"),
        (S3, "fsspec", "max_retrys", "max_retries"),
        (S3, "fsspec", "virtual_hosted_style_request", None),
    ],
)
def test_an_unknown_name_is_refused_with_the_nearest(
    url: str, client: str, given: str, close: str | None
) -> None:
    options = {given: "secret-value", "client": client}
    with pytest.raises(InputError, match=f"{client} has no such option: {given}") as refused:
        open_store(url, options=options)
    if close is not None:
        assert refused.value.next_step == f"did you mean {close}?"
    assert "secret-value" not in str(refused.value)


@pytest.mark.parametrize(
    ("url", "client", "names"),
    [
        (S3, "obstore", ("virtual_hosted_style_request", "aws_unsigned_payload", "allow_http")),
        (AZURE, "obstore", ("azure_use_emulator", "authority_host")),
        (S3, "fsspec", ("requester_pays", "default_block_size", "use_ssl", "config_kwargs")),
    ],
)
def test_names_of_the_client_itself_are_known(
    url: str, client: str, names: tuple[str, ...]
) -> None:
    check_option_names(parse_url(url), dict.fromkeys(names) | {"client": client})
