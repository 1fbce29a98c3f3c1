"""Random names through each real store."""

from __future__ import annotations

import itertools

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from arroyo_dagster.state import ObjectStore, StatePath
from arroyo_dagster.state.storage import encode_path
from tests.contract.conftest import NewStore
from tests.contract.test_object_store import assert_same_but_for_a_second
from tests.formats import path_error

# The file system takes 255 bytes of a name that may become three times as long.
_SEGMENTS = st.one_of(
    st.text(st.characters(codec="utf-8", exclude_characters="/\\\0"), min_size=1, max_size=15),
    st.text("aB9-_.%~#<>[]{}^|*?\"` +&=:;@,$!'()", min_size=1, max_size=20),
)
_PATHS = st.lists(_SEGMENTS, min_size=1, max_size=4).map("/".join)
_NUMBERS = itertools.count()


@st.composite
def sets_of_paths(draw: st.DrawFn) -> list[StatePath]:
    found = draw(st.lists(_PATHS.filter(lambda path: not path_error(path)), min_size=1, max_size=4))
    # A disk takes no name for a file and a directory at once, and calls `name#5` its own leftover.
    return [
        StatePath(f"{number}/{path}")
        for number, path in enumerate(found)
        if not path.rpartition("#")[2].isdigit()
    ]


def test_any_name_is_written_listed_read_and_deleted(new_store: NewStore) -> None:
    store: ObjectStore = new_store()

    @given(sets_of_paths())
    @settings(max_examples=12, suppress_health_check=[HealthCheck.too_slow])
    def check(found: list[StatePath]) -> None:
        run = f"run-{next(_NUMBERS)}"
        paths = [StatePath(f"{run}/{path}") for path in found]
        for path in paths:
            assert store.create(path, path.encode()) is True
            assert store.create(path, b"") is False
        listed = list(store.list(run)) if paths else []
        assert [info.path for info in listed] == sorted(paths, key=encode_path)
        for info in listed:
            assert info.addressable
            assert store.read(info.path) == info.path.encode()
            assert_same_but_for_a_second(store.head(info.path), info)
        assert store.delete_many(paths).failed == {}
        assert not paths or list(store.list(run)) == []

    store.put(StatePath("kept"), b"")
    check()
