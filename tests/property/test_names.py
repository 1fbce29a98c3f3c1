"""Names of objects, to and from what a store holds."""

from __future__ import annotations

import pickle
import re

from hypothesis import example, given
from hypothesis import strategies as st

from arroyo_dagster.errors import InputError
from arroyo_dagster.state import StatePath
from arroyo_dagster.state.storage.names import (
    StoredName,
    decode_path,
    is_staging,
    listed_path,
    stored_prefix,
)
from tests.formats import path_error
from tests.stores import encode_path

texts = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=40)
segments = texts.map(lambda text: text.replace("/", "").replace("\\", "")).filter(
    lambda text: text not in ("", ".", "..")
)
raw_paths = (
    st.lists(segments, min_size=1, max_size=4)
    .map("/".join)
    .filter(lambda text: path_error(text) is None)
)
encoded_look = st.text("ab%3CcE2/.<#~ é", min_size=1, max_size=12)


@given(raw_paths)
@example("operator-SessionWindow<30s>/table-s-000")
@example("100%/%2F/%%")
def test_every_path_comes_back_from_its_stored_name(raw: str) -> None:
    stored = encode_path(StatePath(raw))
    assert decode_path(stored) == raw
    assert listed_path(stored) == raw
    assert stored.count("/") == raw.count("/")


@given(raw_paths)
def test_a_stored_name_holds_plain_ascii_only(raw: str) -> None:
    stored = encode_path(StatePath(raw))
    assert re.fullmatch(r"(?:[ !$&'()+,\-./0-9:;=@A-Z_a-z]|%[0-9A-F]{2})+", stored)
    assert not is_staging(stored)


@given(raw_paths, raw_paths)
def test_two_paths_never_share_a_stored_name(one: str, other: str) -> None:
    assert (encode_path(one) == encode_path(other)) == (one == other)


@given(st.one_of(texts, encoded_look))
@example("a%3cb")
@example("a%2Fb")
@example("a/%2E%2E/b")
@example("a//b")
@example("bad%FF")
@example("\udcff")
def test_a_stored_name_is_a_path_or_is_refused(stored: str) -> None:
    path = listed_path(stored)
    if isinstance(path, StoredName):
        assert path == stored
        assert pickle.loads(pickle.dumps(path)) == path
        assert isinstance(pickle.loads(pickle.dumps(path)), StoredName)
        try:
            encode_path(path)
        except InputError:
            pass
        else:
            raise AssertionError("a stored name was taken for a path")
    else:
        assert encode_path(path) == stored
        assert path_error(path) is None


@given(raw_paths)
def test_a_prefix_is_the_stored_directory(raw: str) -> None:
    assert stored_prefix(raw) == stored_prefix(f"{raw}/") == f"{encode_path(raw)}/"
