"""Modules of the user's are found by those who name them and by their neighbours, nobody else."""

from __future__ import annotations

import ast
import gc
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from arroyo_dagster.errors import InputError
from arroyo_dagster.user_modules import import_file, import_named, open_folders, parse_python


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    before, path = set(sys.modules), list(sys.path)
    yield tmp_path
    assert sys.path == path
    open_folders()
    for name in set(sys.modules) - before:
        del sys.modules[name]


def test_a_file_behind_a_link_has_the_name_and_the_neighbours_of_the_link(folder: Path) -> None:
    (folder / "um_far").mkdir()
    (folder / "um_far" / "um_v1.py").write_text("from um_beside import ONE")
    (folder / "um_beside.py").write_text("ONE = 1")
    (folder / "um_linked.py").symlink_to(folder / "um_far" / "um_v1.py")
    assert import_file(str(folder / "um_linked.py")).__name__ == "um_linked"


def test_nobody_else_finds_what_lies_in_an_open_folder(folder: Path) -> None:
    (folder / "um_trap.py").write_text("raise SystemExit('executed')")
    open_folders(str(folder))
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("um_trap")


def test_what_is_installed_is_never_replaced(folder: Path) -> None:
    for name in ("json", "antigravity", "moto"):
        (folder / f"{name}.py").write_text("raise SystemExit('executed')")
    open_folders(str(folder))
    assert Path(import_named("json").__file__ or "").parent.name == "json"
    for name in ("json", "antigravity", "moto"):
        with pytest.raises(InputError, match="another module is called"):
            import_file(str(folder / f"{name}.py"))


def test_code_in_the_definition_itself_may_import_what_lies_beside_it(folder: Path) -> None:
    (folder / "um_beside.py").write_text("ONE = 1")
    open_folders(str(folder))
    names = {"__name__": "sdf.count"}
    exec("from um_beside import ONE", names)
    assert names["ONE"] == 1


def test_a_file_that_fails_can_be_imported_once_it_is_mended(folder: Path) -> None:
    file = folder / "um_broken.py"
    file.write_text("1 / 0")
    with pytest.raises(ZeroDivisionError):
        import_file(str(file))
    assert "um_broken" not in sys.modules


def test_the_first_open_folder_wins_and_later_calls_close_it(folder: Path) -> None:
    for name in ("a", "b"):
        (folder / name).mkdir()
        (folder / name / "um_twice.py").write_text(f"WHERE = {name!r}")
    open_folders(str(folder / "a"), str(folder / "b"))
    assert import_named("um_twice").WHERE == "a"
    open_folders()
    del sys.modules["um_twice"]
    with pytest.raises(ModuleNotFoundError):
        import_named("um_twice")


class _Parsing:
    """An object in a cycle whose finalizer parses, as one does that logs a traceback."""

    def __init__(self) -> None:
        self.itself = self

    def __del__(self) -> None:
        ast.parse("x = 1")


def test_source_is_parsed_although_a_finalizer_parses_meanwhile() -> None:
    source = "".join(f"def f{number}(a, b):\n    return a + b\n" for number in range(400))
    gc.collect()
    threshold = gc.get_threshold()
    gc.set_threshold(300)  # the collector runs while nodes are made
    try:
        _Parsing()
        assert len(parse_python(source).body) == 400
    finally:
        gc.set_threshold(*threshold)
