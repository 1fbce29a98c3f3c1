"""Metadata of a real Arroyo that is lost or cut: nothing that it listed is deleted or rewritten."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from arroyo_dagster import cli
from tests.compat.arroyo import unpack
from tests.damages import field_ends
from tests.shares import Share, dealt_out

COUNT = "carrier_totals/checkpoints/checkpoint-0000008"
TUMBLE = "pl_j0nlvQZC9h/job_oYFrrHarjc/generations/2/checkpoints"
IMPULSE = "job_mSLGII6lDN/checkpoints/checkpoint-0000009/operator-source_impulse_0/metadata"


@pytest.fixture(scope="module")
def roots(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The three archives, unpacked: tests put back what they change."""
    found = {name: tmp_path_factory.mktemp(name) for name in ("flights", "legacy", "leader")}
    for name, root in found.items():
        unpack(name, root)
    return found


def call(root: Path, *arguments: str) -> tuple[int, Any]:
    """Run a command of one job with --json: its exit code, and the document."""
    result = CliRunner().invoke(cli.main, [*arguments, "--json", "--url", f"file://{root}"])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.output
    return result.exit_code, json.loads(result.stdout or result.stderr)


def gc(root: Path, kind: str, job: str, *more: str) -> tuple[int, Any]:
    rule = ("--keep", "2") if kind == "expire" else ("--older-than", "1h")
    return call(root, "gc", "plan", kind, job, *rule, "--assume", f"{job}=stopped", *more)


@contextmanager
def replaced(path: Path, data: bytes | None) -> Iterator[None]:
    """Replace an object, or remove it (None), and put it back with its time."""
    whole, times = path.read_bytes(), path.stat()
    if data is None:
        path.unlink()
    else:
        path.write_bytes(data)
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    try:
        yield
    finally:
        path.write_bytes(whole)
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


CUTS = [
    ("flights", f"{COUNT}/metadata"),
    ("flights", f"{COUNT}/operator-updating_aggregate_4/metadata"),
    ("flights", f"{COUNT}/operator-source_flights_0/metadata"),
    ("flights", "carrier_totals/checkpoints/checkpoint-0000004/metadata"),
    ("flights", "same_aircraft/checkpoints/checkpoint-0000008/operator-join_5/metadata"),
    ("leader", f"{TUMBLE}/checkpoint-0000023/checkpoint-manifest.pb"),
    ("leader", f"{TUMBLE}/checkpoint-0000022/checkpoint-manifest.pb"),
    ("leader", f"{TUMBLE}/checkpoint-0000015/checkpoint-manifest.pb"),
]


def job_of(name: str) -> str:
    """The job of an object, as commands name it."""
    return name.partition("/checkpoints/" if name.count("/generations/") == 0 else "/generations/")[
        0
    ]


def planned(root: Path, kind: str, job: str) -> set[str] | None:
    """The data files that a plan deletes; None if gc refuses."""
    code, plan = gc(root, kind, job)
    if code != 0:
        return None
    return {path for path, *_ in plan["data"]}


@pytest.mark.parametrize(("archive", "name", "cases"), dealt_out(CUTS, of=5))
def test_metadata_cut_at_any_field_lets_gc_delete_no_listed_file(
    roots: dict[str, Path], archive: str, name: str, cases: Share
) -> None:
    root, job = roots[archive], job_of(name)
    unlisted = {kind: planned(root, kind, job) for kind in ("orphans", "expire")}
    data = (root / name).read_bytes()
    newest = "checkpoint-0000008" in name or "checkpoint-0000023" in name
    for end in cases(field_ends(data)):
        with replaced(root / name, data[:end]):
            for kind, before in unlisted.items():
                deletes = planned(root, kind, job)
                assert deletes is None or (before is not None and deletes <= before), end
            if newest:
                assert call(root, "verify", job)[0] != 0, f"cut to {end} bytes"


def test_gc_of_a_job_whose_newest_operator_metadata_was_cut_deletes_nothing(
    roots: dict[str, Path],
) -> None:
    root = roots["flights"]
    metadata = root / COUNT / "operator-updating_aggregate_4/metadata"
    with replaced(metadata, metadata.read_bytes()[:80]):
        code, refusal = gc(root, "orphans", "carrier_totals")
        assert code == 1
        assert "is lost or damaged" in refusal["error"]["message"]
        assert "arroyo-state rebuild carrier_totals 8" in refusal["error"]["next_step"]
        _, verdict = call(root, "verify", "carrier_totals")
        assert [one["code"] for one in verdict["findings"]] == ["metadata-unreadable"]


@pytest.mark.parametrize("kind", ["orphans", "expire"])
def test_gc_refuses_while_an_older_epoch_lacks_what_epochs_before_it_have(
    roots: dict[str, Path], kind: str
) -> None:
    with replaced(roots["legacy"] / IMPULSE, None):
        code, refusal = gc(roots["legacy"], kind, "job_mSLGII6lDN")
    assert code == 1
    assert refusal["error"]["facts"]["path"] == IMPULSE


def test_empty_checkpoint_metadata_is_no_epoch(roots: dict[str, Path]) -> None:
    root = roots["flights"]
    with replaced(root / COUNT / "metadata", b""):
        _, epochs = call(root, "epochs", "carrier_totals")
        assert [one["state"] for one in epochs[-2:]] == ["ready", None]
        assert planned(root, "orphans", "carrier_totals") is None
        assert call(root, "verify", "carrier_totals")[0] == 3


def test_a_job_that_was_copied_under_another_name_is_refused(
    roots: dict[str, Path], tmp_path: Path
) -> None:
    shutil.copytree(roots["flights"] / "carrier_totals", tmp_path / "copy")
    shutil.copytree(roots["leader"] / "pl_j0nlvQZC9h", tmp_path / "pl_copy")
    for job in ("copy", "pl_copy/job_oYFrrHarjc"):
        for kind in ("orphans", "expire"):
            code, refusal = gc(tmp_path, kind, job)
            assert code == 1
            assert "names another job" in refusal["error"]["message"]
        assert call(tmp_path, "verify", job)[0] != 0
