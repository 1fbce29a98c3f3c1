"""Names and defaults of options and config fields that users have."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.surfaces import PATH, surfaces

KNOWN = json.loads(PATH.read_text())
NOW = surfaces()


def kept(now: Any, known: Any) -> Any:
    """What is still there of the known settings; new ones, in groups too, are left out."""
    if not isinstance(now, dict) or not isinstance(known, dict):
        return now
    return {name: kept(now[name], known[name]) for name in known if name in now}


@pytest.mark.parametrize("name", KNOWN["options"])
def test_options_keep_their_names_and_defaults(name: str) -> None:
    assert kept(NOW["options"][name], KNOWN["options"][name]) == KNOWN["options"][name]


@pytest.mark.parametrize("name", KNOWN["configs"])
def test_config_fields_keep_their_names_and_defaults(name: str) -> None:
    assert kept(NOW["configs"][name], KNOWN["configs"][name]) == KNOWN["configs"][name]


def test_new_settings_are_added_to_the_known_ones() -> None:
    for surface, known in KNOWN.items():
        assert {name: set(one) for name, one in NOW[surface].items()} == {
            name: set(one) for name, one in known.items()
        }, "run `python -m tests.surfaces`"
