"""Modules keep their old names for one release, and warn."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from arroyo_dagster.moved import moved_modules

OLD = sorted(moved_modules())


@pytest.mark.parametrize("old", OLD)
def test_old_name_gives_the_module_and_warns(old: str) -> None:
    new = importlib.import_module(moved_modules()[old])
    sys.modules.pop(old, None)
    with pytest.warns(DeprecationWarning, match=f"{old} is {new.__name__} now"):
        assert importlib.import_module(old) is new
    assert new.__spec__ is not None
    assert new.__spec__.name == new.__name__ == moved_modules()[old]


def test_old_names_work_in_every_form_of_import() -> None:
    code = (
        "from arroyo_dagster.state.local import jobs\n"
        "from arroyo_dagster.state.local.jobs import list_jobs\n"
        "import arroyo_dagster.state.sdf.topics.files\n"
        "from arroyo_dagster.state.operations.catalog import jobs as now\n"
        "assert jobs is now and list_jobs is now.list_jobs\n"
        "from arroyo_dagster.state.codec.bincode import codec_for\n"
        "from arroyo_dagster.state.codec.hashing import hash_key\n"
    )
    root = Path(__file__).parents[2]
    answer = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=False
    )
    assert answer.returncode == 0, answer.stderr


def test_no_module_of_ours_uses_an_old_name() -> None:
    code = (
        "import arroyo_dagster, definitions\n"
        "for name in dir(arroyo_dagster): getattr(arroyo_dagster, name)\n"
    )
    command = [sys.executable, "-W", "error:.*the old name goes:DeprecationWarning", "-c", code]
    subprocess.run(command, cwd=Path(__file__).parents[2], check=True)
