"""Names and defaults of options and config fields that users have."""

from __future__ import annotations

import json

import pytest

from tests.surfaces import PATH, surfaces

KNOWN = json.loads(PATH.read_text())
NOW = surfaces()


@pytest.mark.parametrize("name", KNOWN["options"])
def test_options_keep_their_names_and_defaults(name: str) -> None:
    assert NOW["options"][name].items() >= KNOWN["options"][name].items()


@pytest.mark.parametrize("name", KNOWN["configs"])
def test_config_fields_keep_their_names_and_defaults(name: str) -> None:
    assert NOW["configs"][name].items() >= KNOWN["configs"][name].items()


def test_new_settings_are_added_to_the_known_ones() -> None:
    for surface, known in KNOWN.items():
        assert {name: set(one) for name, one in NOW[surface].items()} == {
            name: set(one) for name, one in known.items()
        }, "run `python -m tests.surfaces`"
