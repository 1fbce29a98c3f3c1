"""The file with the last list of pipelines: whole, and never overwritten by another's names."""

from __future__ import annotations

import json
import os
import stat
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from arroyo_dagster.errors import FormatError, InputError, StorageError
from arroyo_dagster.orchestration import PipelineList
from arroyo_dagster.orchestration.pipelines.cache import ListCache, default_path
from arroyo_dagster.orchestration.pipelines.listing import Facts, RootListing, merged

URL = "s3://bucket/key"


def made(*roots: str, last: PipelineList | None = None, **names: str) -> PipelineList:
    facts = {root: Facts(name=name) for root, name in names.items()}
    roots = (*roots, *names)
    return merged(last, RootListing(url=URL, listed_at_micros=1, roots=roots), facts)


def test_a_list_is_read_as_it_was_written(tmp_path: Path) -> None:
    cache = ListCache(tmp_path / "below" / "list.json")
    assert cache.read() is None
    first = made("a", b="Ü/ \n")
    assert cache.write(first) == first == cache.read()
    second = made("c", last=first)
    assert cache.write(second) == second == cache.read()
    assert [path.name for path in cache.path.parent.iterdir()] == ["list.json"]


def test_a_list_with_a_problem_is_not_written(tmp_path: Path) -> None:
    cache = ListCache(tmp_path / "list.json")
    failed = replace(made("a"), problem="the network is down")
    assert cache.write(failed) is failed
    assert cache.read() is None


def test_the_first_key_wins_where_two_code_servers_name_a_pipeline(tmp_path: Path) -> None:
    cache = ListCache(tmp_path / "list.json")
    named, unnamed = made(a="orders"), made("a", "b")
    assert cache.write(named) == named
    assert cache.write(unnamed) == named
    assert cache.write(made("a", "b", last=cache.read())).keys == {"a": ("orders",), "b": ("b",)}


def test_many_writers_at_once_leave_one_whole_list(tmp_path: Path) -> None:
    cache = ListCache(tmp_path / "list.json")
    first = cache.write(made("a"))

    def write(number: int) -> PipelineList:
        cache.write(made(f"job_{number}", last=cache.read() or first))
        found = cache.read()
        assert found is not None
        return found

    with ThreadPoolExecutor(8) as pool:
        seen = list(pool.map(write, range(40)))
    last = cache.read()
    assert last is not None
    assert all(found.keys.items() <= last.keys.items() for found in seen)
    assert [path.name for path in tmp_path.iterdir()] == ["list.json"]


GOOD: dict[str, Any] = json.loads(made("a/b", c="orders").to_json())


def changed(**fields: Any) -> bytes:
    return json.dumps(GOOD | fields).encode()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"[]",
        b"\xff",
        changed()[:-9],
        changed(form=2),
        changed(form=None),
        changed(pipelines={}),
        changed(pipelines=[GOOD["pipelines"][0]] * 2),
        changed(pipelines=[GOOD["pipelines"][0] | {"root": "../x"}]),
        changed(pipelines=[GOOD["pipelines"][0] | {"key": []}]),
        changed(pipelines=[GOOD["pipelines"][0] | {"managed": "no"}]),
        changed(keys={}),
        changed(keys={"a/b": ["x"], "c": ["orders"]}),
        changed(keys=GOOD["keys"] | {"d": ["orders"]}),
        changed(missing=None),
    ],
)
def test_a_damaged_file_is_named_and_kept(data: bytes, tmp_path: Path) -> None:
    cache = ListCache(tmp_path / "list.json")
    cache.path.write_bytes(data)
    for call in (cache.read, lambda: cache.write(made("a"))):
        with pytest.raises(FormatError) as caught:
            call()
        assert caught.value.facts["path"] == str(cache.path)
        assert "remove it" in (caught.value.next_step or "")
    assert cache.path.read_bytes() == data


def test_a_directory_that_cannot_be_written_is_an_error_with_its_path(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    cache = ListCache(tmp_path / "file" / "list.json")
    with pytest.raises(StorageError, match="cannot be written") as caught:
        cache.write(made("a"))
    assert caught.value.facts["path"] == str(cache.path)
    (tmp_path / "list.json").mkdir()
    with pytest.raises(StorageError, match="cannot be read"):
        ListCache(tmp_path / "list.json").read()


def test_a_writer_that_dies_leaves_the_old_list(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = ListCache(tmp_path / "list.json")
    first = cache.write(made("a"))

    def die(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", die)
    with pytest.raises(KeyboardInterrupt):
        cache.write(made("b", last=first))
    assert cache.read() == first
    assert [path.name for path in tmp_path.iterdir()] == ["list.json"]


def test_the_place_of_the_file_depends_on_deployment_and_url_without_credentials() -> None:
    def path(deployment: str | None = None, url: str = URL) -> Path:
        return default_path("/home", deployment, url)

    assert path().parent == Path("/home/arroyo_pipelines")
    assert path("blue").parent == Path("/home/arroyo_pipelines/blue")
    assert path(url="https://u:p@h/x?sig=1") == path(url="https://u:q@h/x?sig=2")
    assert len({path(), path("blue"), path(url="s3://bucket/other")}) == 3
    with pytest.raises(InputError, match="not a name for a deployment"):
        path("../x")


def test_others_may_not_read_the_file(tmp_path: Path) -> None:
    cache = ListCache(tmp_path / "list.json")
    cache.write(made("a"))
    assert stat.S_IMODE(cache.path.stat().st_mode) == 0o600
