"""Collect the pages of the documentation site below a folder, for `make docs`.

The pages are those of `docs/` and some of the repository's root, with links that fit the site; the
references of the command line and of Python are generated here. Run it from any folder:
`python docs/site/stage.py FOLDER`.
"""

from __future__ import annotations

import ast
import importlib
import posixpath
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

PROJECT = Path(__file__).parents[2]
DOCS = PROJECT / "docs"

ROOT_PAGES = {
    "README.md": "project/readme.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "SECURITY.md": "project/security.md",
    "CHANGELOG.md": "project/changelog.md",
    "requirements/README.md": "project/locks.md",
    "LICENSE": "project/license.txt",
}
"""Pages outside docs/, by their place in the repository: their place on the site."""

API_PAGES = {
    "reference/python-state.md": "arroyo_dagster/state/__init__.pyi",
    "reference/python-engine.md": "arroyo_dagster/engine/__init__.pyi",
    "reference/python-dagster.md": "arroyo_dagster/orchestration/__init__.pyi",
    "reference/python-sdf.md": "arroyo_dagster/sdf.py",
}
"""Generated pages, by their place on the site: the file that lists the public names."""

CLI_PAGE = "reference/cli-help.md"
GENERATED = (CLI_PAGE, *API_PAGES)

TITLES = {
    "reference/python-state.md": ("Python: state", "arroyo_dagster.state"),
    "reference/python-engine.md": ("Python: engine", "arroyo_dagster.engine"),
    "reference/python-dagster.md": ("Python: Dagster", "arroyo_dagster"),
    "reference/python-sdf.md": ("Python: SDF", "arroyo_dagster.sdf"),
}

_LINK = re.compile(r"(\]\()([^)\s]+)(\))")
_CODE = re.compile(r"^```.*?^```[ ]*$|`[^`\n]+`", re.MULTILINE | re.DOTALL)


def pages() -> dict[str, str]:
    """Return the place on the site of every page of the repository, by its place there."""
    found = dict(ROOT_PAGES)
    for path in sorted(DOCS.rglob("*.md")):
        name = path.relative_to(DOCS).as_posix()
        found[f"docs/{name}"] = re.sub(r"(^|/)README\.md$", r"\1index.md", name)
    return found


def links(text: str) -> list[str]:
    """Return the links of a page that lead to no other host, code left out."""
    found = [match[2] for match in _LINK.finditer(_CODE.sub("", text))]
    return [link for link in found if not re.match(r"https?://|mailto:", link)]


def fit_links(text: str, page: str, places: dict[str, str]) -> str:
    """Return the text of a page of the repository with links that fit its place on the site.

    Raises:
        SystemExit: a link leads to a file that is not on the site.
    """

    def fit(match: re.Match[str]) -> str:
        link = match[2]
        if re.match(r"https?://|mailto:|#", link):
            return match[0]
        name, _, anchor = link.partition("#")
        target = posixpath.normpath(posixpath.join(posixpath.dirname(page), name))
        on_site = places.get(target) or _asset(target)
        if on_site is None:
            raise SystemExit(f"{page}: the link {link} leads to a file that is not on the site")
        fitted = posixpath.relpath(on_site, posixpath.dirname(places[page]) or ".")
        return match[1] + fitted + (f"#{anchor}" if anchor else "") + match[3]

    kept, end = [], 0
    for code in _CODE.finditer(text):
        kept += [_LINK.sub(fit, text[end : code.start()]), code[0]]
        end = code.end()
    return "".join(kept) + _LINK.sub(fit, text[end:])


def separate_lists(text: str) -> str:
    """Return the text with an empty line before each list that interrupts a paragraph.

    Code hosts need none there; the site's tool would take such a list for text.
    """
    lines: list[str] = []
    in_code = in_paragraph = False
    for line in text.splitlines():
        in_code ^= line.startswith("```")
        is_item = re.match(r"(- |\* |1\. )", line) is not None
        if is_item and in_paragraph and not in_code:
            lines.append("")
        if not line or is_item or in_code:
            in_paragraph = False
        elif not in_paragraph:
            in_paragraph = bool(lines) and not lines[-1] and line[0] not in " |#>`-*"
            in_paragraph |= line.startswith("**")
        lines.append(line)
    return "\n".join(lines) + "\n"


def _asset(target: str) -> str | None:
    is_picture = target.endswith((".png", ".svg")) and (PROJECT / target).is_file()
    return target.removeprefix("docs/") if is_picture else None


# ---- the reference of the command line -----------------------------------------------------------


def cli_page() -> str:
    """Return the page with the `--help` of every command."""
    from arroyo_dagster.cli import main

    lines = [
        "# `--help` of every command",
        "",
        "Generated from the commands. [Command line](../reference-cli.md) has exit codes",
        "and environment variables.",
    ]
    for name, help_text in _helps(main, "arroyo-state"):
        lines += ["", f"## {name}", "", "```text", help_text, "```"]
    return "\n".join(lines) + "\n"


def _helps(command: object, name: str, parent: object = None) -> Iterator[tuple[str, str]]:
    import click

    assert isinstance(command, click.Command)
    assert parent is None or isinstance(parent, click.Context)
    last = name.rpartition(" ")[2]
    context = click.Context(command, info_name=last, parent=parent, terminal_width=100)
    context.max_content_width = 100
    yield name, command.get_help(context).rstrip()
    if isinstance(command, click.Group):
        for word in command.list_commands(context):
            below = command.get_command(context, word)
            if below is not None and not below.hidden:
                yield from _helps(below, f"{name} {word}", context)


# ---- the reference of Python ---------------------------------------------------------------------


def public_names(listing: str) -> dict[str, str]:
    """Return where each public name that a file lists is defined, by the name.

    A `.pyi` file lists them as imports, a `.py` file in `__all__`.
    """
    path = PROJECT / listing
    package = listing.removesuffix(path.name).strip("/").replace("/", ".")
    tree = ast.parse(path.read_text())
    found = {}
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.module:
            origin = f"{package}.{node.module}" if node.level else node.module
            found |= {one.asname or one.name: f"{origin}.{one.name}" for one in node.names}
    if path.suffix == ".pyi":
        return found
    chosen = next(
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    )
    return {name: found[name] for name in chosen}


def api_page(place: str) -> str:
    """Return a page with the docstrings of all public names, in order of name."""
    title, package = TITLES[place]
    lines = [
        f"# {title}",
        "",
        f"Generated from the docstrings. Import these names from `{package}`.",
    ]
    names = public_names(API_PAGES[place])
    for name in sorted(names, key=str.lower):
        lines += ["", f"::: {names[name]}", *_fields(names[name])]
    return "\n".join(lines) + "\n"


def _fields(path: str) -> list[str]:
    """Return a table of the fields of a pydantic model, whose descriptions are not docstrings."""
    import pydantic

    module, _, name = path.rpartition(".")
    found = getattr(importlib.import_module(module), name)
    if not (isinstance(found, type) and issubclass(found, pydantic.BaseModel)):
        return []
    rows = list(_rows(found))
    return ["", "| Field | Default | Meaning |", "|---|---|---|", *rows] if rows else []


def _rows(model: type[Any], before: str = "") -> Iterator[str]:
    """Yield a row for each field, and for those of a section of the component's YAML."""
    from arroyo_dagster.orchestration.yaml.model import YamlModel

    for field, info in model.model_fields.items():
        name = f"{before}{field}"
        yield f"| `{name}` | {_default(info)} | {_cell(info.description or '')} |"
        for kind in (info.annotation, *get_args(info.annotation)):
            if isinstance(kind, type) and issubclass(kind, YamlModel):
                yield from _rows(kind, f"{name}.")


def _default(info: Any) -> str:
    if info.is_required():
        return "required"
    default = info.default if info.default_factory is None else info.default_factory()
    text = repr(default)
    # A default that is a value of this package is described where its class is.
    return (
        f"`{_cell(text)}`" if len(text) <= 40 and "(" not in text else f"{type(default).__name__}"
    )


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def stage(folder: Path) -> None:
    """Write configuration, pages and pictures of the site below `folder`."""
    source = folder / "pages"
    shutil.rmtree(source, ignore_errors=True)
    places = pages()
    for page, place in places.items():
        target = source / place
        target.parent.mkdir(parents=True, exist_ok=True)
        text = (PROJECT / page).read_text()
        if page.endswith(".md"):
            text = separate_lists(fit_links(text, page, places))
        target.write_text(text)
    for path in [*DOCS.rglob("*.png"), *DOCS.rglob("*.svg"), DOCS / "site" / "site.css"]:
        target = source / path.relative_to(DOCS)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
    (source / "reference").mkdir(exist_ok=True)
    (source / CLI_PAGE).write_text(cli_page())
    for place in API_PAGES:
        (source / place).write_text(api_page(place))
    configuration = (DOCS / "site" / "zensical.toml").read_text()
    (folder / "zensical.toml").write_text(configuration.replace("@PROJECT@", str(PROJECT)))


if __name__ == "__main__":
    sys.path.insert(0, str(PROJECT))
    stage(Path(sys.argv[1]))
