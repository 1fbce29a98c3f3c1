"""The documentation site: every page has a place in the navigation, every link leads somewhere."""

from __future__ import annotations

import ast
import importlib.util
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from arroyo_dagster.state import MemoryStore
from tests import documentation
from tests.jobs import run_word_job

PROJECT = Path(__file__).parents[1]
SITE = PROJECT / "docs" / "site"
STATE = PROJECT / "arroyo_dagster" / "state"
ORCHESTRATION = PROJECT / "arroyo_dagster" / "orchestration"


def _module(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"docs_site_{name}", SITE / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = found  # dataclasses look their module up
    spec.loader.exec_module(found)
    return found


stage = _module("stage")
diagrams = _module("diagrams")
MOST_WORDS = 30_000
LOOKED_UP = {"DESCRIPTION.md", "docs/reference-cli.md", "docs/operate/runbook.md"}
PAGES = {page: place for page, place in stage.pages().items() if page.endswith(".md")}


# ---- navigation ----------------------------------------------------------------------------------


def _leaves(navigation: Any) -> Iterator[str]:
    if isinstance(navigation, str):
        yield navigation
        return
    for below in navigation.values() if isinstance(navigation, dict) else navigation:
        yield from _leaves(below)


def _configuration() -> dict[str, Any]:
    return tomllib.loads((SITE / "zensical.toml").read_text())["project"]


def test_the_navigation_holds_every_page_of_users_once() -> None:
    shown = list(_leaves(_configuration()["nav"]))
    ours = {page for page in PAGES if re.match("docs/(decisions|spec)/", page)}
    assert sorted(shown) == sorted([*(PAGES[page] for page in {*PAGES} - ours), *stage.GENERATED])
    architecture = (PROJECT / "docs" / "architecture.md").read_text()
    assert all(f"({folder}/README.md)" in architecture for folder in ("decisions", "spec"))


def test_the_pages_of_users_are_few_words() -> None:
    """Without code and without what is looked up: the reference and the runbook."""
    texts = [(PROJECT / page).read_text() for page in documentation.PAGES if page not in LOOKED_UP]
    words = [re.sub(r"```.*?```", "", text, flags=re.DOTALL).split() for text in texts]
    assert sum(map(len, words)) <= MOST_WORDS


def test_no_font_comes_from_another_host() -> None:
    assert _configuration()["theme"]["font"] is False
    assert not re.search(r"(src|url\()\W*https?:", (SITE / "site.css").read_text())


# ---- links ---------------------------------------------------------------------------------------


def _anchors(text: str) -> set[str]:
    """The anchors of a page's headings, as code hosts and the site's tool make them."""
    found: set[str] = set()
    headings = re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), re.M)
    for heading in headings:
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        found.add(re.sub(r"[^\w\- ]", "", plain.lower()).strip().replace(" ", "-"))
    return found


@pytest.mark.parametrize("page", [*PAGES, "DESCRIPTION.md"])
def test_every_link_of_a_page_leads_to_a_page_and_heading(page: str) -> None:
    text = (PROJECT / page).read_text()
    for link in stage.links(text):
        name, _, anchor = link.partition("#")
        target = (PROJECT / page).parent / name if name else PROJECT / page
        assert target.is_file(), f"{page}: {link}"
        if anchor:
            assert anchor in _anchors(target.read_text()), f"{page}: {link}"
    stage.fit_links(text, page, stage.pages())  # and everything is on the site


def test_links_are_fitted_to_the_site() -> None:
    text = "[a](../README.md#x) `[b](c.md)` ![p](pictures/soak.png) [u](https://example.com/)"
    places = {"docs/gc.md": "gc.md", "README.md": "project/readme.md"}
    fitted = stage.fit_links(text, "docs/gc.md", places)
    assert fitted == text.replace("../README.md", "project/readme.md")


def test_a_link_to_a_file_that_is_not_on_the_site_is_refused() -> None:
    with pytest.raises(SystemExit, match=r"definitions\.py"):
        stage.fit_links("[a](../definitions.py)", "docs/gc.md", {"docs/gc.md": "gc.md"})


def test_a_list_that_interrupts_a_paragraph_is_separated() -> None:
    text = (
        "# T\n\nText:\n- a\n  more\n- b\n\n- c\n- d\n\n```sh\nls\n- x\n```\n\n**Bold.**\n1. one\n"
    )
    expected = text.replace("Text:\n", "Text:\n\n").replace("Bold.**\n", "Bold.**\n\n")
    assert stage.separate_lists(text) == expected
    assert stage.separate_lists(expected) == expected


# ---- generated pages and pictures ----------------------------------------------------------------


@pytest.mark.parametrize("place", stage.API_PAGES)
def test_the_reference_of_python_names_what_exists(place: str) -> None:
    names = stage.public_names(stage.API_PAGES[place])
    assert len(names) >= 5
    package = importlib.import_module(stage.TITLES[place][1])
    for name, path in names.items():
        module, _, origin = path.rpartition(".")
        assert getattr(package, name) is getattr(importlib.import_module(module), origin)
        assert f"\n::: {path}\n" in stage.api_page(place)


def test_the_reference_of_python_has_the_fields_of_models() -> None:
    page = stage.api_page("reference/python-dagster.md")
    component = page.split("component.ArroyoStateComponent\n")[1].split("\n:::")[0]
    assert "| `checkpoint_url` | required | The checkpoint URL, in any form" in component
    assert "| `advanced.layout` | `'auto'` | Which jobs to show, by layout. |" in component
    assert "| `advanced.maintenance.gc.keep_epochs` | `10` |" in component


def test_the_reference_of_the_command_line_has_the_help_of_every_command() -> None:
    page = stage.cli_page()
    for command in ("arroyo-state", "arroyo-state gc plan", "arroyo-state sdf show"):
        assert f"\n## {command}\n" in page
        assert f"Usage: {command} " in page


def test_the_diagrams_are_those_of_their_text() -> None:
    drawn = diagrams.draw()
    assert set(drawn) == set((PROJECT / "docs" / "pictures").glob("concept-*.svg"))
    text = (PROJECT / "docs" / "concepts.md").read_text()
    for path, content in drawn.items():
        assert path.read_text() == content, "run `python docs/site/diagrams.py`"
        assert f"(pictures/{path.name})" in text


def test_the_plot_and_the_table_of_keyed_state_are_those_of_the_figures() -> None:
    plots = _module("plots")
    assert plots.PICTURE.read_text() == plots.draw(), "run `python docs/site/plots.py`"
    assert plots.table() in (PROJECT / "docs" / "state-by-key.md").read_text()
    found = plots.figures()
    for name in ("one_micros", "batch_micros", "epoch_micros"):
        assert max(found[name]) <= 1.5 * min(found[name])
    assert max(found["memory_bytes"]) <= 150
    assert max(found["restore_seconds"]) <= 60


def test_the_plot_and_the_tables_of_scale_are_those_of_the_figures() -> None:
    plots = _module("plots")
    assert plots.SCALE_PICTURE.read_text() == plots.draw_scale(), "run `python docs/site/plots.py`"
    page = (PROJECT / "docs" / "operate" / "scale.md").read_text()
    assert {axis for axis, _ in plots.scale()} == {"files", "epochs", "rows"}
    for axis in ("files", "epochs", "rows"):
        assert plots.scale_table(axis) in page


# ---- the runbook ---------------------------------------------------------------------------------

CODE = re.compile(r"[a-z]+(-[a-z0-9]+)+")
MAKERS = {"error", "warning", "note", "either", "Finding"}
"""The functions that make a finding; its code is an argument of this form."""


def _codes() -> set[str]:
    found = set()
    for path in STATE.rglob("*.py"):
        found |= {text for text in _texts_of_findings(path) if CODE.fullmatch(text)}
    return found


def _texts_of_findings(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") in MAKERS:
            for one in (*node.args, *(word.value for word in node.keywords)):
                if isinstance(one, ast.Constant) and isinstance(one.value, str):
                    yield one.value


def _checks() -> set[str]:
    from arroyo_dagster import ArroyoOptions, build_arroyo_definitions

    store = MemoryStore()
    run_word_job(store, rows=4, rows_per_epoch=2)
    dataflow = PROJECT / "examples" / "sdf" / "words" / "dataflow.yaml"
    defs = build_arroyo_definitions(store.url, options=ArroyoOptions(dataflows=[dataflow]))
    return {key.name for key in defs.resolve_asset_graph().asset_check_keys}


def _entries() -> dict[str, str]:
    text = (PROJECT / "docs" / "operate" / "runbook.md").read_text()
    sections = re.split(r"^### ", text, flags=re.MULTILINE)[1:]
    return {section.split("\n", 1)[0]: section.split("\n## ")[0] for section in sections}


ROW = re.compile(r"^\| `([a-z0-9-]+)` \| [a-z, ]+ \| \S.+ \| \S.+ \|$", re.MULTILINE)
"""A finding that only `health` has, in the table of its kind."""
WITHOUT_RULE = {
    *("job-missing", "no-job", "root-missing"),
    *("less-than-forecast", "merge-differs"),
}
"""Findings of Dagster's fleet, which knows the jobs that there were, and of compactions."""


CHANGED = "file-changed"
"""The finding that only Dagster has, which remembers what was verified last."""


def test_the_runbook_has_a_row_for_every_finding_of_the_fleet() -> None:
    codes = {
        text
        for text in _texts_of_findings(ORCHESTRATION / "fleet.py")
        if re.fullmatch(r"[a-z]+(-[a-z]+)*", text)
    }
    assert {"unknown", "vanished"} < codes
    assert codes - {"no-epoch"} == set(ROW.findall(_entries()["every_pipeline_known"]))
    verdicts = {*_texts_of_findings(ORCHESTRATION / "verify" / "verdict.py")}
    assert {text for text in verdicts if CODE.fullmatch(text)} - {CHANGED} <= _codes()
    assert CHANGED in verdicts


def test_the_runbook_has_an_entry_for_every_finding_kind_and_check() -> None:
    from arroyo_dagster.state.planning.rules import KINDS, RULE_OF, RULES

    codes, checks, entries = _codes(), _checks(), _entries()
    assert len(codes) > 50
    assert "file-missing" in codes
    assert "restorable" in checks
    rows = {kind: set(ROW.findall(entries[kind])) for kind in KINDS}
    assert {"healthy", "every_pipeline_known"} <= checks
    assert set(entries) | set().union(*rows.values()) == codes | checks | set(KINDS) | {CHANGED}
    for kind, its in rows.items():
        assert {RULE_OF[code].kind for code in its} <= {kind}
    assert set(RULE_OF) == codes - WITHOUT_RULE
    assert sum(len(rule.codes) for rule in RULES) == len(RULE_OF)
    assert len(KINDS) <= 10


def test_a_check_links_to_its_entry_on_the_built_site() -> None:
    from arroyo_dagster.orchestration.translator import check_description

    assert _configuration()["use_directory_urls"] is False
    page = PAGES["docs/operate/runbook.md"].removesuffix(".md")
    text = check_description("Text.", "healthy", "https://docs.example.com/")
    assert f"(https://docs.example.com/{page}.html#healthy)" in text
    assert "healthy" in _entries()


@pytest.mark.parametrize("name", sorted(_entries()))
def test_an_entry_of_the_runbook_says_what_to_do(name: str) -> None:
    entry = _entries()[name]
    assert re.search(r"^\*.+\.\* \S", entry, re.MULTILINE), "severity or asset, and meaning"
    assert re.search(r"^\*\*Do:\*\* \S", entry, re.MULTILINE) or ROW.search(entry)
