"""An option that no client knows is refused with the nearest known name, without a connection."""

from __future__ import annotations

import pytest

from arroyo_dagster.errors import InputError
from arroyo_dagster.state import open_store

S3, GS, AZURE = "s3://b/k", "gs://b/k", "abfss://c@a.dfs.core.windows.net/k"


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
def test_unknown_name_has_the_nearest(url: str, client: str, given: str, close: str | None) -> None:
    options = {given: "secret-value", "client": client}
    with pytest.raises(InputError, match=f"{client} has no such option: {given}") as refused:
        open_store(url, options=options)
    if close is not None:
        assert refused.value.next_step == f"did you mean {close}?"
    assert "secret-value" not in str(refused.value)
