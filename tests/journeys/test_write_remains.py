"""What killed writes leave on local disk is swept by gc, and find-key names it."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from arroyo_dagster.state import open_store
from tests.commands import document, run
from tests.compat.arroyo import unpack
from tests.contract import servers
from tests.jobs import run_word_job

JOB = "carrier_totals"
STOPPED = ("--assume", f"{JOB}=stopped")
DAY_SECONDS = 86_400
DATA = "checkpoints/checkpoint-0000008/operator-updating_aggregate_4"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    unpack("flights", tmp_path)
    return tmp_path


def answer(root: Path, *words: str) -> Any:
    return document(f"file://{root}", *words)


def leave(root: Path, name: str, age_seconds: float) -> Path:
    """Leave what a killed write leaves: a part of a file beside its target."""
    path = root / JOB / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"PAR1 rows in clear text")
    then = time.time() - age_seconds
    os.utime(path, (then, then))
    return path


def test_gc_orphans_plans_and_deletes_old_remains_only(root: Path) -> None:
    old = leave(root, f"{DATA}/table-a-000#4711123456789", 2 * DAY_SECONDS)
    record = leave(root, "_arroyo_dagster/pins#99", 2 * DAY_SECONDS)
    stay = [
        leave(root, f"{DATA}/table-a-000#4711123456790", DAY_SECONDS / 2),
        leave(root, f"{DATA}/table-a-000#4711-copy", 2 * DAY_SECONDS),
        leave(root, f"{DATA}/notes%23123", 2 * DAY_SECONDS),
        leave(root, f"../other/{DATA}/table-a-000#1", 2 * DAY_SECONDS),
    ]
    plan = answer(root, "gc", "plan", "orphans", JOB, *STOPPED)
    names = [one["name"] for one in plan["remains"]]
    assert names == sorted(str(path.relative_to(root)) for path in (old, record))
    said = run(f"file://{root}", "gc", "plan", "orphans", JOB, *STOPPED).stdout
    assert "2 remains of interrupted writes" in said
    assert old.exists()
    done = answer(root, "gc", "run", "orphans", JOB, *STOPPED, "--yes")
    assert (done["done"], done["remains"]) == (True, 2)
    assert not old.exists()
    assert not record.exists()
    assert [path for path in stay if not path.exists()] == []
    assert answer(root, "gc", "plan", "orphans", JOB, *STOPPED)["remains"] == []


def test_a_stored_plan_takes_no_later_remains(root: Path, tmp_path: Path) -> None:
    old = leave(root, f"{DATA}/table-a-000#1", 2 * DAY_SECONDS)
    url, plan = f"file://{root}", str(tmp_path / "plan.json")
    assert run(url, "gc", "plan", "orphans", JOB, *STOPPED, "--out", plan).exit_code == 0
    later = leave(root, f"{DATA}/table-a-001#2", 3 * DAY_SECONDS)
    done = run(url, "gc", "run", "orphans", JOB, *STOPPED, "--plan", plan, "--yes")
    assert done.exit_code == 0, done.output
    assert (old.exists(), later.exists()) == (False, True)


def test_find_key_names_remains_that_may_hold_the_key(root: Path) -> None:
    left = leave(root, f"{DATA}/table-a-000#4711123456789", 0)
    leave(root, "_arroyo_dagster/pins#99", 0)
    search = answer(root, "find-key", JOB, "UA")
    assert search["remains"] == [str(left.relative_to(root))]
    assert search["versions"] is False
    said = run(f"file://{root}", "find-key", JOB, "UA").stdout
    assert f"may hold the key: {left.relative_to(root)}" in said


@pytest.mark.parametrize(
    ("status", "versions", "said"),
    [
        (None, False, ""),
        ("Enabled", True, "the bucket keeps versions"),
        ("Suspended", True, "the bucket keeps versions"),
        ("denied", None, "whether the bucket keeps versions is not known"),
    ],
)
@pytest.mark.parametrize("client", ["obstore", "fsspec"])
def test_find_key_says_whether_the_bucket_keeps_versions(
    status: str | None,
    versions: bool | None,
    said: str,
    client: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def dialect(app: Any) -> Any:
        def denying(environ: dict[str, Any], start: Any) -> Any:
            if status == "denied" and environ.get("QUERY_STRING", "").startswith("versioning"):
                start("403 Forbidden", [("Content-Length", "0")])
                return [b""]
            return app(environ, start)

        return denying

    keys = {"access_key_id": "testing", "secret_access_key": "testing", "region": "us-east-1"}
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    monkeypatch.setenv("ARROYO_DAGSTER_STORE_CLIENT", client)
    bucket = f"versions-{str(status).lower()}-{client}"
    with servers.moto_server(dialect) as host:
        servers.make_moto_bucket(bucket)
        url = f"s3::http://{host}/{bucket}/root"
        run_word_job(open_store(url, options=keys), rows=4, rows_per_epoch=2, parallelism=1)
        if status in ("Enabled", "Suspended"):
            servers.set_moto_versioning(bucket, status)
        result = run(url, "find-key", "words/main", "the", "--json")
        assert result.exit_code == 0, result.output
        assert json.loads(result.stdout)["versions"] is versions
        assert said in run(url, "find-key", "words/main", "the").stdout
