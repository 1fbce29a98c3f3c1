"""Every URL form of arroyo-state.md 10.2."""

from __future__ import annotations

import pytest

from arroyo_dagster.errors import InputError
from arroyo_dagster.state.storage.urls import CheckpointUrl
from tests.stores import parse_url

S3 = CheckpointUrl(backend="s3", bucket="b.u-1", key_prefix="k/e y")
R2 = CheckpointUrl(backend="r2", bucket="my-bucket", key_prefix="k", account="acct")
GS = CheckpointUrl(backend="gs", bucket="b", key_prefix="k")
AZURE = CheckpointUrl(backend="azure", bucket="box", key_prefix="k/l", account="acct")
FILE = CheckpointUrl(backend="file", key_prefix="tmp/arroyo")
EU = CheckpointUrl(backend="s3", bucket="b", key_prefix="k", region="eu-west-1")
MINIO = CheckpointUrl(backend="s3", bucket="b", key_prefix="k", endpoint="http://localhost:9000")
R2_EU = CheckpointUrl(
    backend="r2", bucket="my-bucket", key_prefix="k", account="acct", jurisdiction="eu"
)


@pytest.mark.parametrize(
    ("text", "expected", "canonical"),
    [
        ("s3://b.u-1/k/e y", S3, "s3://b.u-1/k/e y"),
        ("S3A://b.u-1/k/e y", S3, "s3://b.u-1/k/e y"),
        ("s3a://b.u-1//k/e y/", S3, "s3://b.u-1/k/e y"),
        ("s3://b", CheckpointUrl(backend="s3", bucket="b"), "s3://b"),
        ("https://s3.eu-west-1.amazonaws.com/b/k", EU, "https://s3.eu-west-1.amazonaws.com/b/k"),
        ("https://b.s3.eu-west-1.amazonaws.com/k", EU, "https://s3.eu-west-1.amazonaws.com/b/k"),
        ("s3::http://localhost:9000/b/k", MINIO, "s3::http://localhost:9000/b/k"),
        ("S3a::http://localhost:9000/b/k", MINIO, "s3::http://localhost:9000/b/k"),
        (
            "s3::https://minio.example.com:9000/b",
            CheckpointUrl(backend="s3", bucket="b", endpoint="https://minio.example.com:9000"),
            "s3::https://minio.example.com:9000/b",
        ),
        ("S3://b.u-1/k/e y", S3, "s3://b.u-1/k/e y"),
        ("https://s3.eu-west-1.amazonaws.com/b/k/", EU, "https://s3.eu-west-1.amazonaws.com/b/k"),
        (
            "https://a_b.storage.googleapis.com",
            CheckpointUrl(backend="gs", bucket="a_b"),
            "https://storage.googleapis.com/a_b",
        ),
        ("R2://acct@my-bucket/k", R2, "r2://acct@my-bucket/k"),
        ("r2://b", CheckpointUrl(backend="r2", bucket="b"), "r2://b"),
        ("https://acct.r2.cloudflarestorage.com/my-bucket/k", R2, "r2://acct@my-bucket/k"),
        ("https://my-bucket.acct.r2.cloudflarestorage.com/k", R2, "r2://acct@my-bucket/k"),
        (
            "https://acct.eu.r2.cloudflarestorage.com/my-bucket/k",
            R2_EU,
            "https://acct.eu.r2.cloudflarestorage.com/my-bucket/k",
        ),
        (
            "https://my-bucket.acct.eu.r2.cloudflarestorage.com/k",
            R2_EU,
            "https://acct.eu.r2.cloudflarestorage.com/my-bucket/k",
        ),
        ("s3::https://acct.r2.cloudflarestorage.com:443/my-bucket/k", R2, "r2://acct@my-bucket/k"),
        ("GS://b/k", GS, "gs://b/k"),
        ("https://storage.googleapis.com/b/k", GS, "gs://b/k"),
        ("https://b.storage.googleapis.com/k", GS, "gs://b/k"),
        (
            "https://storage.googleapis.com/a_b",
            CheckpointUrl(backend="gs", bucket="a_b"),
            "https://storage.googleapis.com/a_b",
        ),
        ("abfs://box@acct.dfs.core.windows.net/k/l", AZURE, None),
        ("abfss://box@acct.dfs.core.windows.net/k/l", AZURE, None),
        ("https://acct.blob.core.windows.net/box/k/l", AZURE, None),
        ("https://acct.dfs.core.windows.net/box/k/l", AZURE, None),
        ("/tmp/arroyo", FILE, "file:///tmp/arroyo"),
        ("/tmp//./arroyo/", FILE, "file:///tmp/arroyo"),
        ("file:/tmp/arroyo", FILE, "file:///tmp/arroyo"),
        ("file:///tmp/arroyo", FILE, "file:///tmp/arroyo"),
        ("file://tmp/arroyo", FILE, "file:///tmp/arroyo"),
        ("memory://x-1", CheckpointUrl(backend="memory", bucket="x-1"), "memory://x-1"),
    ],
)
def test_each_form_is_normalized(text: str, expected: CheckpointUrl, canonical: str | None) -> None:
    parsed = parse_url(text)
    assert parsed == expected
    assert str(parsed) == (canonical or "abfss://box@acct.dfs.core.windows.net/k/l")
    assert parse_url(str(parsed)) == parsed


@pytest.mark.parametrize(
    "text",
    [
        "",
        "checkpoints",
        "./checkpoints",
        "s3://",
        "s3://b/",
        "s3://Upper/k",
        "s3::http://localhost/b",
        "s3::http://localhost:9000/b/",
        "https://s3.eu-west-1.amazonaws.com/b/",
        "https://storage.googleapis.com/b/",
        "r2://acct@b/",
        "abfs://box@acct.dfs.core.windows.net/",
        "s3a",
        "gs://a_b/k",
        "ftp://host/x",
        "http://s3.us-east-1.amazonaws.com/b",
        "https://example.com/b",
        "abfs://box@evil.example.com/k",
        "/tmp/../etc",
        "/",
        "file:///",
        "s3://b/../c",
        "memory://",
        "memory://a/b",
        "/tmp/a\0b",
    ],
)
def test_anything_else_is_refused_with_the_accepted_forms(text: str) -> None:
    with pytest.raises(InputError, match="s3://bucket/key"):
        parse_url(text)


@pytest.mark.parametrize(
    "text",
    [
        "s3::http://user:hunter2@host:9000/b/k",
        "ftp://user:hunter2@host/b",
        "https://acct.blob.core.windows.net/box/k?sv=1&sig=hunter2",
        "https://s3.us-east-1.amazonaws.com/b/k?X-Amz-Signature=hunter2",
        "https://example.com/b#hunter2",
        "s3://KEY:hunter2@bucket/k",
    ],
)
def test_a_secret_in_a_url_is_refused_and_not_repeated(text: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_url(text)
    assert "hunter2" not in str(caught.value)
    assert "hunter2" not in repr(caught.value.facts)
