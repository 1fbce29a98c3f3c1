"""JSON records of the protocol, byte for byte."""

from __future__ import annotations

import json
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from arroyo_dagster.errors import FormatError, InputError
from arroyo_dagster.state.codec.derived import encode
from tests.compat.arroyo import DATA
from tests.formats import records

_R = "pl_91ySiX3Vs7/job_VQcj96EYII"
_CP = f"{_R}/generations/%d/checkpoints/checkpoint-%07d/checkpoint-manifest.pb"
_HEAD = '{"version":1,"pipeline_id":"pl_91ySiX3Vs7","job_id":"job_VQcj96EYII",'

Codec = tuple[Callable[[bytes, str], Any], Callable[[Any], bytes]]
CURRENT: Codec = (records.decode_current_generation, encode)
GENERATION: Codec = (records.decode_generation_manifest, encode)
EPOCH: Codec = (records.decode_epoch_record, encode)
MARKER: Codec = (records.decode_committed_marker, encode)

EXAMPLES = {
    "current": (
        CURRENT,
        _HEAD + '"generation":2,"generation_manifest_ref":'
        f'"{_R}/generations/2/generation-manifest.json","updated_at_micros":1795224842563059}}',
    ),
    "generation": (
        GENERATION,
        _HEAD + f'"generation":2,"base_checkpoint_ref":"{_CP % (1, 17)}",'
        f'"latest_checkpoint_ref":"{_CP % (2, 21)}","updated_at_micros":1795224842711074}}',
    ),
    "epoch": (
        EPOCH,
        _HEAD + f'"epoch":18,"generation":2,"parent_checkpoint_ref":"{_CP % (1, 17)}",'
        f'"checkpoint_ref":"{_CP % (2, 18)}","created_at_micros":1795224844977556}}',
    ),
    "marker": (
        MARKER,
        _HEAD + '"epoch":18,"checkpoint_generation":2,"writer_generation":2,'
        f'"checkpoint_ref":"{_CP % (2, 18)}"}}',
    ),
}
BY_NAME = {
    "current-generation.json": CURRENT,
    "generation-manifest.json": GENERATION,
    "committed.json": MARKER,
}


def real_records() -> Iterator[tuple[str, bytes]]:
    with tarfile.open(DATA / "arroyo-leader.tar.gz") as file:
        for member in file:
            content = file.extractfile(member)
            if content is not None and member.name.endswith((".json", ".record")):
                yield member.name, content.read()


def test_every_record_of_a_real_arroyo_is_written_again_byte_for_byte() -> None:
    seen = set()
    for path, data in real_records():
        name = Path(path).name
        decode, encode = BY_NAME.get(name, EPOCH)
        assert encode(decode(data, path)) == data, path
        seen.add(name if name in BY_NAME else "record")
    assert seen == {*BY_NAME, "record"}


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_record_with_a_missing_or_wrong_field_is_refused_by_the_name_of_the_field(
    name: str,
) -> None:
    (decode, _), text = EXAMPLES[name]
    fields = json.loads(text)
    for field in fields:
        may_be_null = field in (
            "base_checkpoint_ref",
            "latest_checkpoint_ref",
            "parent_checkpoint_ref",
        )
        missing = {key: value for key, value in fields.items() if key != field}
        if may_be_null:
            decode(json.dumps(missing).encode(), "p")
            decode(json.dumps(fields | {field: None}).encode(), "p")
        else:
            with pytest.raises(FormatError, match=field):
                decode(json.dumps(missing).encode(), "p")
        with pytest.raises(FormatError, match=field):
            decode(json.dumps(fields | {field: [1]}).encode(), "p")


@pytest.mark.parametrize("name", EXAMPLES)
def test_fields_of_a_later_release_are_kept_behind_those_that_are_known(name: str) -> None:
    (decode, encode), text = EXAMPLES[name]
    later = '"later":{"a":[1,null,"ü"],"b":1.5},"zero":18446744073709551616'
    extended = f"{text[:-1]},{later}}}".encode()
    assert encode(decode(extended, "p")) == extended
    first = f"{{{later},{text[1:]}".encode()
    assert encode(decode(first, "p")) == extended
    assert decode(extended, "p") != decode(text.encode(), "p")


@pytest.mark.parametrize("name", EXAMPLES)
@pytest.mark.parametrize(
    "value", ["NaN", "-Infinity", "1e400", '"\\ud800"', "[" * 100_000, "9" * 5000]
)
def test_what_is_no_json_for_arroyo_is_refused(name: str, value: str) -> None:
    (decode, _), text = EXAMPLES[name]
    for data in (
        f'{text[:-1]},"later":{value}}}'.encode(),
        text.replace('"version":1', f'"version":{value}').encode(),
        text.replace('"pl_91ySiX3Vs7"', value).encode(),
    ):
        with pytest.raises(FormatError) as caught:
            decode(data, "the/path")
        assert caught.value.facts["path"] == "the/path"
        assert len(str(caught.value)) < 1000


def test_a_record_of_a_later_version_is_read_and_never_written() -> None:
    (decode, encode), text = EXAMPLES["current"]
    later = decode(text.replace('"version":1', '"version":2').encode(), "p")
    assert later.version == 2
    with pytest.raises(InputError, match="version"):
        encode(later)
