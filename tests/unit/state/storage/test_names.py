"""Names against the examples of arroyo-state.md 1.3."""

from __future__ import annotations

import pytest

from arroyo_dagster.errors import InputError
from arroyo_dagster.state.storage.names import (
    StoredName,
    decode_path,
    is_staging,
    stored_prefix,
    stored_start,
)
from tests.stores import encode_path


@pytest.mark.parametrize(
    ("raw", "stored"),
    [
        ("operator-SessionWindow<30s>", "operator-SessionWindow%3C30s%3E"),
        ("a b", "a b"),
        ("%3C", "%253C"),
        ("a#5", "a%235"),
        ("é", "%C3%A9"),
        ("\r\n\x7f\x01", "%0D%0A%7F%01"),
        ('{^}%`]">[~<#|*?', "%7B%5E%7D%25%60%5D%22%3E%5B%7E%3C%23%7C%2A%3F"),
        ("!$&'()+,-.:;=@_", "!$&'()+,-.:;=@_"),
        ("...", "..."),
    ],
)
def test_exactly_these_bytes_are_encoded(raw: str, stored: str) -> None:
    assert encode_path(raw) == stored
    assert decode_path(stored) == raw


@pytest.mark.parametrize(
    ("name", "staging"),
    [("table#12", True), ("a/b#0", True), ("table", False), ("a#", False), ("a#1b", False)],
)
def test_staging_leftovers_are_told_from_objects(name: str, staging: bool) -> None:
    assert is_staging(name) is staging


def test_a_stored_name_serves_to_list_and_for_nothing_else() -> None:
    assert stored_prefix(StoredName("a<")) == "a</"
    assert stored_start(StoredName("a<")) == "a<"
    with pytest.raises(InputError):
        stored_prefix(StoredName("../a"))
    with pytest.raises(InputError):
        encode_path(StoredName("a<"))
