"""Every page and section that a docstring names is in `docs/`; every link of a page resolves."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[1]
PACKAGE = PROJECT / "arroyo_dagster"
DOCS = PROJECT / "docs"
MODULES = sorted(path for path in PACKAGE.rglob("*.py") if "_pb2" not in path.name)
PAGES = sorted(
    [*PROJECT.glob("*.md"), *DOCS.rglob("*.md"), *(PROJECT / "requirements").glob("*.md")]
)
FOLDERS = (DOCS, DOCS / "spec", DOCS / "decisions")
"""Where a page that is named without its folder may lie, each name once."""

NAMED = re.compile(r"(?<![\w.])([a-z][a-z0-9-]*(?:/[a-z0-9-]+)*\.md)\b(?!\()`?")
SECTION = r"(?:\d+(?:\.\d+)*)"
SECTIONS = re.compile(rf"\s*,?\s+({SECTION}(?:(?:,| to| and|, and)\s+{SECTION}\b)*)")
LINK = re.compile(r"\]\(([^)\s]+)\)")


def resolved(page: str) -> list[Path]:
    """The files that a name may mean: one if it is a path, else those of that name in `FOLDERS`."""
    if "/" in page:
        return [path for path in [PROJECT / page] if path.is_file()]
    return [folder / page for folder in FOLDERS if (folder / page).is_file()]


def sections(page: Path) -> set[str]:
    """The numbers of a page's headings, and of the table rows that carry a number of their own."""
    text = page.read_text()
    headings = re.findall(rf"^#+ ({SECTION})\.? ", text, re.MULTILINE)
    return {*headings, *re.findall(rf"^\| ({SECTION}) \|", text, re.MULTILINE)}


def named(text: str) -> Iterator[tuple[str, list[str]]]:
    """The pages that a text names, each with the section numbers that follow it."""
    flat = re.sub(r"\s*\n\s*(?:# )?", " ", text)
    for match in NAMED.finditer(flat):
        follows = SECTIONS.match(flat, match.end())
        yield match[1], re.findall(SECTION, follows[1]) if follows else []


def unresolved(text: str) -> list[str]:
    """What `text` names that is not there."""
    wrong = []
    for page, numbers in named(text):
        found = resolved(page)
        if len(found) != 1:
            wrong.append(f"{page}: {len(found)} pages of that name below docs/")
            continue
        known = sections(found[0])
        wrong += [f"{page} {number}: no such section" for number in numbers if number not in known]
    return wrong


def test_what_is_missing_is_found() -> None:
    assert not unresolved("Source: arroyo-state.md 9.6 and\n    9.8; docs/decisions/rollback.md.")
    assert not unresolved("sdf-states.md 2.3 to 2.6, 2.9 and 8.1; errors E10 to E23.")
    assert not unresolved('dg.MetadataValue.md("text") is not a page')
    assert unresolved("Source: no-such-page.md 1.") == [
        "no-such-page.md: 0 pages of that name below docs/"
    ]
    assert unresolved("(`arroyo-state.md` 5.4 and\n# 5.99)") == [
        "arroyo-state.md 5.99: no such section"
    ]
    assert unresolved("docs/decisions/gone.md") != []


@pytest.mark.parametrize("module", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_every_page_and_section_that_a_module_names_exists(module: Path) -> None:
    assert not unresolved(module.read_text())


def test_a_page_name_means_one_page() -> None:
    names = [path.name for folder in FOLDERS for path in folder.glob("*.md")]
    twice = {name for name in names if names.count(name) > 1} - {"README.md"}
    assert not twice


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(PROJECT)))
def test_every_link_of_a_page_leads_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(), flags=re.DOTALL)
    targets = {match[1].partition("#")[0] for match in LINK.finditer(text)}
    local = {target for target in targets if target and ":" not in target}
    assert not [target for target in sorted(local) if not (page.parent / target).exists()]


MODULE_PATH = re.compile(r"`(?:arroyo_dagster/)?([a-z_]+(?:/[a-z_]+)*(?:\.py|/))`")
"""A file or a folder of the package, from its root or from `state/`."""
FLOORS = {path.name for path in [*PACKAGE.iterdir(), *(PACKAGE / "state").iterdir()]}


@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if page.parent != DOCS / "spec" or page.stem == "design"],
    ids=lambda path: str(path.relative_to(PROJECT)),
)
def test_every_module_that_a_page_names_exists(page: Path) -> None:
    named = {match[1] for match in MODULE_PATH.finditer(page.read_text())}
    ours = {path for path in named if "/" in path.rstrip("/") and path.partition("/")[0] in FLOORS}
    roots = (PACKAGE, PACKAGE / "state")
    assert not [path for path in sorted(ours) if not any((root / path).exists() for root in roots)]


def test_the_index_of_specifications_lists_every_page() -> None:
    spec = DOCS / "spec"
    listed = set(
        re.findall(r"^\| \[[\w-]+\]\(([\w-]+\.md)\)", (spec / "README.md").read_text(), re.M)
    )
    assert listed == {path.name for path in spec.glob("*.md")} - {"README.md"}
