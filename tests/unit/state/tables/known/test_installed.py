"""Entry points are found wherever `importlib.metadata` finds them; only then it is loaded."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from importlib.metadata import DistributionFinder, EntryPoint, PathDistribution
from pathlib import Path

import pytest

from arroyo_dagster.state.tables.known.installed import entry_points

GROUP = "a_group.of_tables"
TEXT = f"[{GROUP}]\nmine = shop.tables:MINE\n"


def package(folder: Path, metadata: str) -> Path:
    (folder / metadata).mkdir(parents=True)
    (folder / metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: shop\nVersion: 1\n")
    (folder / metadata / "entry_points.txt").write_text(TEXT)
    return folder


def archive(folder: Path) -> Path:
    with zipfile.ZipFile(folder / "shop.zip", "w") as file:
        file.writestr("shop-1.dist-info/METADATA", "Name: shop\n")
        file.writestr("shop-1.dist-info/entry_points.txt", TEXT)
    return folder / "shop.zip"


@pytest.mark.parametrize("kind", ["shop-1.dist-info", "shop.EGG-INFO", "shop-1.egg", "shop.zip"])
def test_entry_points_of_every_kind_of_metadata_are_found(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind == "shop.zip":
        folder = archive(tmp_path)
    elif kind.endswith(".egg"):
        folder = package(tmp_path / kind, "EGG-INFO")
    else:
        folder = package(tmp_path, kind)
    assert [*entry_points(group=GROUP)] == []
    monkeypatch.syspath_prepend(folder)
    assert [*entry_points(group=GROUP)] == [EntryPoint("mine", "shop.tables:MINE", GROUP)]


def test_entry_points_in_the_working_directory_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(package(tmp_path, "shop-1.dist-info"))
    monkeypatch.syspath_prepend("")
    assert [one.name for one in entry_points(group=GROUP)] == ["mine"]


def test_metadata_that_cannot_be_read_is_left_to_importlib(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = package(tmp_path, "shop-1.dist-info")
    broken = package(tmp_path, "broken-1.dist-info") / "broken-1.dist-info" / "entry_points.txt"
    broken.write_bytes(b"\xff\xfe")
    monkeypatch.syspath_prepend(folder)
    with pytest.raises(UnicodeDecodeError):
        entry_points(group=GROUP)


def test_packages_of_another_finder_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = PathDistribution(package(tmp_path, "shop-1.dist-info") / "shop-1.dist-info")

    class Finder(DistributionFinder):
        def find_spec(self, *_: object) -> None:
            return None

        def find_distributions(self, *_: object) -> list[PathDistribution]:
            return [found]

    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, Finder()])
    assert [one.name for one in entry_points(group=GROUP)] == ["mine"]


def test_importlib_metadata_is_not_loaded_where_nothing_names_the_group() -> None:
    code = f"""
import sys
from arroyo_dagster.state.tables.known.installed import entry_points
print([*entry_points(group={GROUP!r})], "importlib.metadata" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[] False\n"
