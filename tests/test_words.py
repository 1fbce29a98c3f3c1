"""Names are the field's: no definition carries a word of the left column of CONTRIBUTING's table,
and no two classes share a name."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "arroyo_dagster"
MODULES = [path for path in sorted(PACKAGE.rglob("*.py")) if path.parent.name != "proto"]

_LEFT = """
aside retained told tell tells telling untold unheard said says say scene landing landed survey
shown drawn word words news seen look looks looked looking fault faults mistake mistakes problem
problems ours arroyos bring brings brought plainly marks beyond piece pieces part parts parted
collect collecting
"""
LEFT = frozenset(_LEFT.split())
ALLOWED = {
    "problem problems": "JSON keys and catalogue columns have this name: why something is unread",
    "retained_epochs": "the key of an asset",
    "collect": "the verb of Spark and of operators",
    "tell": "the method of a file",
    "look_up": "one verb, not `looks`",
    "part parts part_bytes _parts _part_bytes _upload_parts finished_part in_flight_part "
    "in_progress_part multi_part_in_flight multi_part_not_created multi_part_writer_closed "
    "multi_part_writer_upload_completed completed_parts in_flight_parts multi_part_upload_id "
    "parts_to_add": "of a multipart upload, as Arroyo and S3 name it",
    "key_part": "one of the parts of an asset key, as Dagster calls them",
    "_index_part _index_parts": "`part-000001.json` of a quarantine's index",
    "word words _word _words _hash_words _of_words _word_of words_at words_of": "of bits, of SQL",
    "_is_separate_word": "of a text",
}
"""Names of a left-column word that stay, and why."""


def _words(name: str) -> list[str]:
    return _snake(name).split("_")


def _snake(name: str) -> str:
    return re.sub(r"([a-z0-9])([A-Z])", r"\1_\2", name).lower()


def _targets(node: ast.stmt) -> Iterator[str]:
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        yield node.target.id
    elif isinstance(node, ast.Assign):
        yield from (one.id for one in node.targets if isinstance(one, ast.Name))


def _definitions(path: Path) -> Iterator[str]:
    """Classes, functions, fields and constants of a module."""
    tree = ast.parse(path.read_text())
    for node in tree.body:
        yield from _targets(node)
    for one in ast.walk(tree):
        if isinstance(one, ast.ClassDef):
            yield one.name
            for node in one.body:
                yield from _targets(node)
        elif isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef):
            yield one.name


def test_no_definition_carries_a_word_of_the_left_column() -> None:
    allowed = {name for names in ALLOWED for name in names.split()}
    found = {
        f"{path.relative_to(PACKAGE)}: {name}"
        for path in MODULES
        for name in _definitions(path)
        if LEFT.intersection(_words(name)) and _snake(name) not in allowed
    }
    assert found == set()


def test_no_two_classes_share_a_name() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(str(path.relative_to(PACKAGE)))
    assert {name: found for name, found in places.items() if len(found) > 1} == {}
