"""The README: short, and every command and code of it runs as a reader would run it."""

from __future__ import annotations

from tests.documentation import PROJECT, blocks

README = "README.md"
MOST_LINES = 150


def test_the_readme_is_read_in_ten_minutes() -> None:
    assert len((PROJECT / README).read_text().splitlines()) <= MOST_LINES


def test_the_three_commands_are_make_targets() -> None:
    assert blocks(README, "sh")[0].splitlines() == ["make demo", "make ui", "make test"]


def test_the_definitions_of_the_readme_load() -> None:
    (code,) = blocks(README, "python")
    found: dict[str, object] = {}
    exec(code, found)
    assert found["defs"].resolve_all_asset_keys()  # type: ignore[attr-defined]
