"""Protects the rows of a dataflow over five versions: the commands of docs/sdf-changes.md."""

from __future__ import annotations

import json
import re
import shlex
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from arroyo_dagster import cli
from tests.documentation import PROJECT, blocks

PAGE = "docs/sdf-changes.md"
EXAMPLE = PROJECT / "examples" / "sdf" / "changes"
VISITS = [json.loads(line) for line in (EXAMPLE / "visits.jsonl").read_text().splitlines()]
NAMES = {"de": "Germany", "fr": "France"}


class Store:
    """Runs commands of the page against one folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._env = {"ARROYO__CHECKPOINT_URL": f"file://{folder}/visits"}

    def run(self, line: str) -> str:
        command, *args = shlex.split(line)
        assert command == "arroyo-state"
        result = CliRunner().invoke(cli.main, args, env=self._env)
        assert result.exit_code == (4 if "v4.yaml" in line and "sdf run" in line else 0), (
            line + result.output
        )
        return result.stdout

    def block(self, text: str) -> str:
        lines = [line for line in text.splitlines() if not line.startswith("export ")]
        return "".join(self.run(line) for line in lines)

    def rows(self, version: int, state: str) -> dict[str, Any]:
        """The rows of a state by key, as its readers see them."""
        file = f"examples/sdf/changes/v{version}.yaml"
        shown = self.run(f"arroyo-state sdf show {file} count/{state}/state --json")
        return {row["key"]: row["values"] for row in json.loads(shown)["rows"]}


def expected(visits: list[dict[str, str]]) -> tuple[dict[str, int], dict[str, int]]:
    """Count the visits of each page, and find the slowest, with plain Python."""
    slowest: dict[str, int] = {}
    for visit in visits:
        slowest[visit["page"]] = max(slowest.get(visit["page"], 0), int(visit["ms"]))
    return dict(Counter(visit["page"] for visit in visits)), slowest


def test_every_row_is_accounted_for_over_five_versions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(PROJECT)
    store = Store(tmp_path)
    second, third, fourth, fifth, anew = blocks(PAGE, "sh")

    store.block(second)
    read = VISITS[:16]
    counts, slowest = expected(read)
    assert {key: row["Value"] for key, row in store.rows(2, "views").items()} == counts

    store.block(third)
    counts, slowest = expected(read := VISITS[:24])
    assert store.rows(3, "pages") == {
        key: {"visits": counts[key], "slowest": slowest[key], "seconds": slowest[key] / 1000}
        for key in counts
    }
    sizes = store.rows(3, "sizes")

    listed = store.block(fourth)
    read = VISITS[:32]
    failed = [visit for visit in VISITS[24:32] if visit["country"] not in NAMES]
    assert re.search(rf"count_visit\s+{len(failed)}\s", listed)
    counts, _ = expected([visit for visit in read if visit not in failed or visit in VISITS[:24]])
    assert {key: row["Value"] for key, row in store.rows(4, "views").items()} == counts

    shown = store.block(fifth)
    assert re.search(rf"state sizes\s+{len(sizes)}\s", shown)
    counts, slowest = expected(VISITS)
    assert {key: row["Value"] for key, row in store.rows(5, "views").items()} == counts
    pages = store.rows(5, "pages")
    assert {key: (row["visits"], row["slowest"]) for key, row in pages.items()} == {
        key: (counts[key], slowest[key]) for key in counts
    }
    assert "40" in shown

    shown = store.block(anew)
    assert "can be restored: nothing found" in shown
    assert {key: row["Value"] for key, row in store.rows(5, "views").items()} == counts
    assert {key: row["visits"] for key, row in store.rows(5, "pages").items()} == counts


def test_every_definition_on_the_page_is_in_a_version() -> None:
    versions = [file.read_text() for file in sorted(EXAMPLE.glob("*.yaml"))]
    for block in blocks(PAGE, "yaml"):
        assert any(block in text for text in versions), block
