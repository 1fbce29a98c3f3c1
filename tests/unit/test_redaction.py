"""No secret survives in a text that is shown, whatever its characters and whoever repeats it."""

from __future__ import annotations

import gc
import html
import json
import logging
import traceback
from collections.abc import Callable
from urllib.parse import quote, quote_plus

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arroyo_dagster import redaction
from arroyo_dagster.errors import InputError, StorageError
from arroyo_dagster.redaction import (
    redact_causes,
    redact_text,
    redact_url,
    redacted_cause,
    register_options,
    register_secrets,
    register_settings,
    without_secrets,
)
from arroyo_dagster.state.storage.failures import translated
from tests.secrets import CANARY, assert_no_canary


@pytest.fixture(autouse=True)
def forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redaction, "_KNOWN", set())


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("https://user:pw@host:9000/bucket/key", "https://***@host:9000/bucket/key"),
        ("https://token@host/bucket", "https://***@host/bucket"),
        ("https://user:p@ss@host/bucket", "https://***@host/bucket"),
        ("https://user:p/s@host/bucket", "https://***@host/bucket"),
        ("https://user:p?s@host/bucket", "https://***"),
        ("https://user:p#s@host/bucket", "https://***"),
        ("https://host/bucket?sig=a@b", "https://***"),
        ("https://host/bucket?sig=a&x=b", "https://host/bucket?***"),
        ("https://user:p\n s'\"\u00fc@host/b", "https://***@host/b"),
        ("https://user:pw\uff20host/b", "https://***@host/b"),
        ("s3::http://user:pw@host:9000/b/k", "s3::http://***@host:9000/b/k"),
        ("sc://host:15002/;token=abc", "sc://host:15002/?***"),
        ("user:pw@host/state.sqlite", "***@host/state.sqlite"),
        ("user:pw://@host", "***@host"),
        ("https:/user:pw@host/b", "***@host/b"),
        ("abfss://my-box@account.dfs.core.windows.net/k", None),
        (
            "abfss://key:pw@account.dfs.core.windows.net/k",
            "abfss://***@account.dfs.core.windows.net/k",
        ),
        ("r2://account@bucket/k", None),
        ("/data/a@b/state.sqlite", None),
        ("file:///data/a@b", None),
        ("/data/state.sqlite?key=abc", "/data/state.sqlite?***"),
        ("checkpoints", None),
        ("", None),
    ],
)
def test_a_url_is_shown_without_user_info_and_query(url: str, shown: str | None) -> None:
    assert redact_url(url) == (url if shown is None else shown)


@given(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=30),
    st.sampled_from(
        ["https://user:{}@host/b", "s3::http://{}@host:9/b", "ftp://u:{}@h/?x=1", "//u:{}@h"]
    ),
)
def test_no_password_survives_whatever_its_characters(filling: str, form: str) -> None:
    assert "KNR" not in redact_url(form.format(f"KNR1{filling}KNR2"))


ENCODERS: list[Callable[[str], str]] = [
    str,
    repr,
    ascii,
    json.dumps,
    lambda text: json.dumps(text, ensure_ascii=False),
    lambda text: json.dumps(json.dumps(text)),
    quote,
    quote_plus,
    lambda text: quote(text, safe=""),
    lambda text: quote(text, safe="").lower(),
    lambda text: quote(quote(text, safe=""), safe=""),
    lambda text: quote(text, safe=":@/ '\""),
    html.escape,
    lambda text: " ".join(text.split()),
    lambda text: text.replace("\n", ""),
    lambda text: repr(text.encode()),
    lambda text: text.encode("unicode_escape").decode(),
    str.lower,
]


@pytest.mark.parametrize("encode", ENCODERS)
def test_a_known_secret_is_hidden_in_every_spelling(encode: Callable[[str], str]) -> None:
    register_secrets(CANARY)
    text = f"before {encode(CANARY)}\nafter"
    assert_no_canary(redact_text(text))
    assert redact_text(text).startswith("before ")
    assert redact_text(text).endswith("after")
    assert_no_canary(without_secrets(text))


@given(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=20), st.sampled_from(ENCODERS[:-1])
)
def test_any_secret_is_hidden_in_any_spelling(filling: str, encode: Callable[[str], str]) -> None:
    secret = f"KNR1{filling}KNR2"
    register_secrets(secret)
    assert "KNR" not in redact_text(f"x {encode(secret)} y").upper()


def test_a_short_secret_is_hidden_as_a_word_and_leaves_other_words_alone() -> None:
    register_secrets("test")
    assert redact_text("the latest test failed") == "the latest *** failed"
    assert redact_text("key=%2Ftest%2F") == "key=%2F***%2F"
    assert without_secrets("job test") == "job test"


def test_options_are_secrets_unless_they_say_where_the_store_is() -> None:
    register_options(
        {
            "region": "eu-west-1",
            "endpoint": "http://user:KNRendpoint@host",
            "client_kwargs": {"aws_session_token": "KNRnested"},
            "service_account_key": json.dumps({"private_key": "KNR\nkey", "type": "service"}),
            "unheard_of": "KNRother",
        }
    )
    text = "eu-west-1 host KNRendpoint KNRnested KNR\\nkey KNRother"
    assert redact_text(text) == "eu-west-1 host *** *** *** ***"


def test_settings_are_secret_if_their_names_say_so() -> None:
    register_settings(
        {
            "subscribe": "words",
            "fs.s3a.secret.key": "KNRkey",
            "kafka.sasl.jaas.config": 'Plain required username="u" password="KNR jaas";',
            "url": "jdbc:postgresql://host/db?user=u&password=KNRjdbc",
        }
    )
    assert redact_text("words KNRkey 'KNR jaas' KNRjdbc") == "words *** '***' ***"


@pytest.mark.parametrize(
    "variable",
    ["AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "ARROYO_API_TOKEN", "AZURE_STORAGE_SAS_TOKEN"],
)
def test_variable_named_as_a_secret_is_one(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, CANARY)
    assert_no_canary(redact_text(f"the server says {CANARY!r}"))


def test_a_password_in_any_variable_with_a_url_is_a_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTPS_PROXY", f"http://user:{CANARY}@proxy:3128")
    assert_no_canary(redact_text(f"the proxy says {CANARY}"))


@pytest.mark.parametrize(
    "text",
    [
        "error sending request for url (https://user:KNR@host/b?list-type=2&sig=KNR)",
        "Authorization: Basic S05SS05SS05S",
        "Authorization: Bearer KNRKNRKNR",
        "{'password': 'KNR', \"token\": \"KNR\"}",
        "<SessionToken>KNR</SessionToken><SignatureProvided>KNR</SignatureProvided>",
        "X-Amz-Security-Token=KNR&X-Amz-Signature=KNR",
        "AccountName=a;AccountKey=KNR==;EndpointSuffix=core",
    ],
)
def test_what_looks_like_a_secret_is_hidden_even_if_nobody_registered_it(text: str) -> None:
    shown = redact_text(text)
    assert "KNR" not in shown
    assert "S05SS05S" not in shown


def test_what_a_library_says_stays_readable() -> None:
    for text in (
        "403 SignatureDoesNotMatch: The request signature we calculated does not match",
        "InvalidToken: The provided token is malformed or otherwise invalid",
        "[Errno 2] No such file or directory: '/data/a@b/state.sqlite'",
        "Unable to locate credentials",
    ):
        assert redact_text(text) == text


# ---- causes --------------------------------------------------------------------------------------


def _failing() -> None:
    try:
        raise KeyError(CANARY)
    except KeyError as inner:
        raise OSError(f"no answer from https://user:{CANARY}@host") from inner


def test_errors_do_not_repeat_what_libraries_say(caplog: pytest.LogCaptureFixture) -> None:
    register_secrets(CANARY)
    with pytest.raises(StorageError) as caught, translated("s3://bucket"):
        _failing()
    shown = "".join(traceback.format_exception(caught.value))
    assert_no_canary(shown)
    assert "OSError" in shown
    assert "in _failing" in shown  # where it came from stays
    logging.getLogger("test").error("failed", exc_info=caught.value)
    assert_no_canary(caplog.text)


class _Finalized:
    """An object in a cycle whose finalizer fails and logs, as a connection of SQLAlchemy does."""

    def __init__(self) -> None:
        self.itself = self

    def __del__(self) -> None:
        try:
            raise ValueError("closed in another thread")
        except ValueError:
            logging.getLogger("another.library").exception("while closing")


class _RepeatingError(OSError):
    def __str__(self) -> str:
        _Finalized()
        return f"no answer to {CANARY}"


def test_finalizer_that_logs_does_not_repeat_it(caplog: pytest.LogCaptureFixture) -> None:
    register_secrets(CANARY)
    threshold = gc.get_threshold()
    gc.set_threshold(1)
    try:
        with pytest.raises(StorageError), translated("s3://bucket"):
            raise _RepeatingError
        gc.collect()
    finally:
        gc.set_threshold(*threshold)
    assert "closed in another thread" in caplog.text
    assert_no_canary(caplog.text)
    assert gc.isenabled()


def _refusing() -> None:
    try:
        _failing()
    except OSError as error:
        raise InputError("refused") from error


def test_an_error_of_ours_that_was_raised_below_loses_the_secrets_of_its_causes() -> None:
    register_secrets(CANARY)
    with pytest.raises(InputError) as caught, translated("s3://bucket"):
        _refusing()
    assert_no_canary("".join(traceback.format_exception(caught.value)))


def test_a_cause_without_a_secret_stays_the_very_error() -> None:
    error = OSError("nothing to hide")
    assert redacted_cause(error) is error
    ours = InputError("refused")
    ours.__cause__ = error
    redact_causes(ours)
    assert ours.__cause__ is error


@pytest.mark.parametrize("repeated", [" \n\t", "\\", "%", "+", " +", "&", "'", '"', "\\ "])
def test_a_text_that_nearly_holds_a_secret_is_read_in_time(repeated: str) -> None:
    secret = "KNR" + repeated * 30 + "KNR"
    register_secrets(secret)
    for encode in ENCODERS:
        assert "KNR" not in redact_text(f"x {encode(secret)} y").upper()
    text = "KNR" + repeated * 100 + "x"
    assert redact_text(text) == text
