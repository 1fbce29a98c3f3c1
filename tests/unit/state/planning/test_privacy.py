"""Private columns: which names a pattern covers, and that no value of them is left."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arroyo_dagster.errors import InputError
from arroyo_dagster.state import JobId, JobPaths, PipelineId, PrivateColumns
from arroyo_dagster.state.planning.privacy import PRIVATE, TableMask

PATHS = JobPaths(JobId("main"), PipelineId("shop"))


def mask(*patterns: str, table: str = "orders", operator: str = "join_2") -> TableMask:
    return PrivateColumns.of(patterns).table(PATHS, operator, table)


@pytest.mark.parametrize(
    ("pattern", "path", "private"),
    [
        ("email", ("email",), True),
        ("email", ("profile", "email"), True),
        ("email", ("profile", "email", "domain"), True),
        ("email", ("emails",), False),
        ("EMAIL", ("Email",), True),
        ("email", ("_email",), True),
        ("email", ("email_1",), True),  # as a repeated name is shown
        ("email", ("orders.email",), True),  # a qualified name
        ("orders.email", ("email",), True),
        ("orders.email", ("profile", "email"), False),
        ("orders.*.email", ("profile", "email"), True),
        ("orders.*", ("anything",), True),
        ("customers.email", ("email",), False),
        ("join_2.orders.email", ("email",), True),
        ("join-2.orders.email", ("email",), True),
        ("main.orders.email", ("email",), True),  # without the operator
        ("shop.main.join_2.orders.email", ("email",), True),
        ("other.shop.main.join_2.orders.email", ("email",), False),
        ("other.main.orders.email", ("email",), False),
        ("shop.**", ("anything",), True),
        ("shop.**.email", ("profile", "email"), True),
        ("shop.**.email", ("name",), False),
        ("other.**", ("anything",), False),
        ("*mail*", ("e-mail_address",), True),
        ("orders", ("anything",), False),  # a table has no value of its own
        ("main.orders", ("anything",), False),
        ("*.*.nothing", ("anything",), False),
    ],
)
def test_patterns_match_name_ends(pattern: str, path: tuple[str, ...], private: bool) -> None:
    assert mask(pattern).hides(path) is private


def test_tables_of_closed_windows_are_private_as_their_state_is() -> None:
    found = mask("counts._key", table="counts.flushed", operator="flush")
    assert found.hides(("_key",))
    assert found.hides(("key",))


@pytest.mark.parametrize("pattern", ["", ".email", "orders.", "orders..email", " "])
def test_patterns_with_an_empty_part_are_refused(pattern: str) -> None:
    with pytest.raises(InputError, match="empty part"):
        PrivateColumns.of([pattern])


def test_a_text_into_which_a_pattern_leads_is_private_as_a_whole() -> None:
    row = {"payload": '{"email": "ann@example.com"}', "id": 7}
    assert mask("payload.email").row(row) == {"payload": PRIVATE, "id": 7}
    assert mask("orders.payload.email").row(row) == {"payload": PRIVATE, "id": 7}
    assert mask("orders.*.email").row(row) == row  # names no text


def test_nested_values_are_masked_in_lists_and_maps() -> None:
    row = {
        "profile": {"email": "a", "age": 7, "phones": [{"number": 1, "kind": "home"}]},
        "pairs": [["a", {"email": "b"}], ["c", {"email": None}]],
    }
    assert mask("email", "number").row(row) == {
        "profile": {"email": PRIVATE, "age": 7, "phones": [{"number": PRIVATE, "kind": "home"}]},
        "pairs": [["a", {"email": PRIVATE}], ["c", {"email": None}]],
    }


def test_equal_private_keys_have_equal_digests_under_one_salt_only() -> None:
    private = PrivateColumns.of(["email"])
    first, second = (private.table(PATHS, "join_2", table) for table in ("orders", "customers"))
    row = {"email": "ann@example.com", "_key_hash": 17}
    masked = first.row(row, keys=["email"])
    assert masked == second.row(row, keys=["email"])
    assert masked["email"].startswith("private:")
    assert masked["_key_hash"] == PRIVATE  # else a guess could be hashed and compared
    assert masked != mask("email").row(row, keys=["email"])
    assert masked["email"] != first.row({"email": "bob"}, keys=["email"])["email"]


def test_the_hash_of_a_public_key_stays() -> None:
    row = {"id": 7, "email": "a", "_key_hash": 17}
    assert mask("email").row(row, keys=["id"]) == {"id": 7, "email": PRIVATE, "_key_hash": 17}


def test_the_salt_is_never_printed() -> None:
    private = PrivateColumns.of(["email"])
    assert private.salt.hex() not in repr(private)
    assert repr(private.salt) not in repr(private.table(PATHS, "a", "b"))


NAMES = st.sampled_from(["email", "Email", "e-mail", "profile", "id", "_key"])
VALUES = st.recursive(
    st.none() | st.integers() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=8,
)


def _secret(value: object, hidden: bool) -> object:
    """Put a secret in the place of every value at or below a field of the name."""
    if isinstance(value, dict):
        return {
            name: _secret(item, hidden or name.casefold() == "email")
            for name, item in value.items()
        }
    if isinstance(value, list):
        return [_secret(item, hidden) for item in value]
    return "SECRET" if hidden else value


@given(
    row=st.dictionaries(NAMES, VALUES, max_size=4),
    pattern=st.sampled_from(["email", "orders.**.email", "shop.**.email", "**.email"]),
    keys=st.sets(NAMES),
)
def test_private_fields_are_masked(row: dict[str, object], pattern: str, keys: set[str]) -> None:
    masked = mask(pattern).row(_secret(row, False), keys)  # type: ignore[arg-type]
    assert "SECRET" not in json.dumps(masked)
    assert masked.keys() == row.keys()
