"""The catalogue: what Arroyo's tables hold, how others are added, and what stays bytes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from typing import Any

import pytest

from arroyo_dagster.errors import InputError
from arroyo_dagster.state import TableConfig, TableName
from arroyo_dagster.state.codec.bincode.codec import decode, encode
from arroyo_dagster.state.codec.plain import plain_value
from arroyo_dagster.state.tables.known import catalogue as c
from arroyo_dagster.state.tables.known import operators as o
from arroyo_dagster.state.tables.known import sinks as k
from arroyo_dagster.state.tables.known import sources as s
from tests.formats import GlobalKeyedConfig
from tests.formats import types as t

BUILT_IN = c.Catalogue(c.BUILT_IN)
NANOS = 10**9


def config(table: str, description: str, version: int = 0) -> TableConfig:
    kept = GlobalKeyedConfig(table=TableName(table), description=description)
    return TableConfig(config=kept, state_version=version)


ICEBERG = k.IcebergFileMetadata(
    300, [4, -1], {7: k.IcebergColumn(1000, 300, 0, k.ColumnBounds(b"\x01\x00", None))}
)
FINISH = k.FileToFinish("f", None, "u", ["x"], 70000, ICEBERG)
COMMITS = [
    k.FileToCommit("a", k.Multipart("m", ["q"], 9), None),
    k.FileToCommit("b", k.Single(1), ICEBERG),
]
RECOVERY = k.FileSystemDataRecovery(
    3,
    [
        k.InProgressFileCheckpoint("a", None, k.Empty(), 0),
        k.InProgressFileCheckpoint(
            "b", "p", k.MultiPartNotCreated([b"\x01\x02", b""], None, ICEBERG), 2
        ),
        k.InProgressFileCheckpoint(
            "c",
            None,
            k.MultiPartInFlight(
                "u", [k.FinishedPart(1, "e"), k.InProgressPart(2, b"\t")], b"\x08", None
            ),
            1000,
        ),
        k.InProgressFileCheckpoint("d", None, k.MultiPartWriterClosed("u", [], None), 0),
        k.InProgressFileCheckpoint(
            "e", None, k.MultiPartWriterUploadCompleted("u", ["x", "y"], None), 0
        ),
    ],
    -1,
)
FILES_V2 = k.FilesCheckpointV2(
    [
        k.InProgressFile("a", 9, b"\x05", None, k.New()),
        k.InProgressFile("b", 9, b"", ICEBERG, k.MultipartStarted("m", ["q"])),
        k.InProgressFile("c", 0, b"", None, k.SingleFileToFinish()),
    ],
    300,
    5,
)
UDF = o.AsyncUdfState([(1, b"\x07")], [], [(1, o.EventTimeReached(5 * NANOS)), (300, o.Idle())])
LOCAL = k.LocalFileDataRecovery(6, [k.LocalFile("t", 168, b"\x01", "d", None)])

# Computed with the crate bincode 2.0.1 from structs with the fields of the specification.
CRATE: list[tuple[str, str, int, Any, str]] = [
    ("k", "kafka offsets", 0, s.KafkaState(-1, 2**40), "01fd0000000000020000"),
    (
        "k",
        "kinesis source state",
        0,
        s.ShardState("s", "x", s.Timestamp(1700000000 * NANOS + 500), True),
        "0173017803fc00f15365fbf40101",
    ),
    ("k", "kinesis source state", 0, s.ShardState("s", "x", s.Earliest(), False), "017301780000"),
    ("k", "kinesis source state", 0, s.ShardState("s", "x", s.Latest(), False), "017301780100"),
    (
        "r",
        "recovery data",
        0,
        RECOVERY,
        "0305016100000001620101700102020102000001fb2c01020801010efbe803fb2c01000102010000"
        "0201630002017502000101650102010901010800fbe8030164000301750000000165000401750201780179000001",
    ),
    ("r", "recovery data", 0, LOCAL, "06010174a8010101016400"),
    (
        "p",
        "pre-commit data",
        0,
        FINISH,
        "0166000175010178fc7011010001fb2c01020801010efbe803fb2c01000102010000",
    ),
    (
        "r",
        "recovery data",
        1,
        FILES_V2,
        "03016109010500000162090001fb2c01020801010efbe803fb2c0100010201000001016d0101710163000000"
        "02fb2c010a",
    ),
    ("a", "AsyncMapOperator state", 0, UDF, "01010107000201000500fb2c0101"),
    ("s", "polling http source state", 0, s.PollingHttpSourceState(b"\1\2\3"), "0103010203"),
    ("e", "websocket source state", 0, s.WebsocketSourceState(), ""),
    # From the specification.
    ("e", "sse source state", 0, s.SSESourceState("id7"), "0103696437"),
    ("a", "fs", 0, ("a.json", s.RecordsRead(42)), "06612e6a736f6e012a"),
    ("a", "fs", 0, ("a.json", s.Finished()), "06612e6a736f6e00"),
    (
        "i",
        "impulse source state",
        0,
        s.ImpulseSourceState(182, 1795225382292863173),
        "b6fc26f7006bfcc5bc7411",
    ),
]


@pytest.mark.parametrize(("table", "description", "version", "value", "raw"), CRATE)
def test_values_have_the_bytes_of_the_crate(
    table: str, description: str, version: int, value: Any, raw: str
) -> None:
    data = bytes.fromhex(raw)
    told = config(table, description, version)
    kinds = [known.key for known in BUILT_IN.find("x", told) if known.has_version(version)]
    key = encode({str: "s", tuple[()]: ()}.get(kinds[0], 3), kinds[0])
    form = BUILT_IN.form_of("x", told, {key: (version, data)})
    assert form.problem is None
    decoded = form.decode(key, data)
    assert decoded is not None
    assert decoded[1] == value
    assert type(decoded[1]) is type(value)
    assert encode(value, form.value_type) == data


def test_commit_data_decodes_by_the_version_that_left_it() -> None:
    told = config("p", "pre-commit data")
    for value, kind in (
        (COMMITS, list[k.FileToCommit]),
        ({"f": FINISH}, dict[str, k.FileToFinish]),
    ):
        found = BUILT_IN.decode_commit_data("sink_o_1", told, encode(value, kind))
        assert found is not None
        assert found[0] == value
    assert BUILT_IN.decode_commit_data("sink_o_1", told, b"") is None
    assert BUILT_IN.decode_commit_data("sink_o_1", told, b"\xff\xff") is None
    assert BUILT_IN.decode_commit_data("x", config("k", "kafka offsets"), b"\x01") is None
    assert (
        decode(
            bytes.fromhex(
                "02016100016d01017109000162010101fb2c01020801010efbe803fb2c01000102010000"
            ),
            list[k.FileToCommit],
        )
        == COMMITS
    )


def test_what_a_release_before_iceberg_wrote_is_told_from_what_comes_after() -> None:
    @dataclass(frozen=True)
    class OldFinish:
        filename: str
        partition: str | None
        multi_part_upload_id: str
        completed_parts: list[str]
        size: t.USize

    old = encode(OldFinish("f", None, "u", ["x"], 7), OldFinish)
    form = BUILT_IN.form_of("x", config("p", "pre-commit data"), {b"\x01f": (0, old)})
    assert form.known is not None
    assert form.known.releases == "v0.14 and older"
    assert form.plain(b"\x01f", old) == {
        "key": "f",
        "value": {
            "filename": "f",
            "partition": None,
            "multi_part_upload_id": "u",
            "completed_parts": ["x"],
            "size": 7,
        },
    }


def test_people_see_named_fields_and_times() -> None:
    value = s.ShardState("orders", "shard-1", s.Timestamp(1700000000 * NANOS), False)
    assert plain_value(value, t.describe(s.ShardState)) == {
        "stream_name": "orders",
        "shard_id": "shard-1",
        "offset": {"Timestamp": {"at": "2023-11-14T22:13:20.000000000Z"}},
        "closed": False,
    }
    finished = ("a.json", s.Finished())
    assert plain_value(finished, t.describe(tuple[str, s.FileReadState])) == ["a.json", "Finished"]


# ---- what stays bytes ----------------------------------------------------------------------------


def test_entries_that_are_not_what_the_catalogue_says_stay_bytes_and_say_why() -> None:
    told = config("k", "kafka offsets")
    form = BUILT_IN.form_of("source_a_0", told, {b"\x06": (0, b"\x06\xfb")})
    assert form.known is not None
    assert form.plain(b"\x06", b"\x06\xfb") == {"key_hex": "06", "value_hex": "06fb"}
    assert form.problem is not None
    assert "Kafka source" in form.problem
    assert "bytes end within the value" in form.problem
    # A whole value with more behind it, which Arroyo itself would not notice.
    form = BUILT_IN.form_of("source_a_0", told, {b"\x06": (0, b"\x06\x01\x00")})
    assert form.problem is not None


def test_entries_of_another_version_are_not_guessed() -> None:
    told = config("r", "recovery data", 2)
    form = BUILT_IN.form_of("sink_a_0", told, {b"\x00": (2, b"\x00")})
    assert form.problem is not None
    assert "state version 2" in form.problem


# ---- the catalogue of a process ------------------------------------------------------------------

MINE = c.KnownTable(owner="mine", holds="counts", table="x", operator="my_*", key=str, value=t.U32)


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(c, "_registered", [])
    c._installed.cache_clear()
    yield
    c._installed.cache_clear()


def test_a_registered_table_decodes_and_comes_first() -> None:
    c.register_table(MINE)
    c.register_table(MINE)
    assert c.default_catalogue().tables == (MINE, *c.BUILT_IN)
    form = c.default_catalogue().form_of("my_op", config("x", "?"), {b"\x01a": (0, b"\x07")})
    assert form.plain(b"\x01a", b"\x07") == {"key": "a", "value": 7}
    assert c.default_catalogue().find("other_op", config("x", "?")) == ()
    own = c.KnownTable(owner="o", holds="h", description="kafka offsets", key=t.I32, value=str)
    c.register_table(own)
    found = c.default_catalogue().find("x", config("k", "kafka offsets"))
    assert [one.owner for one in found] == ["o", "Kafka source"]


def test_a_package_that_names_something_else_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = EntryPoint("broken", "no_such_module:X", c.ENTRY_POINTS)
    monkeypatch.setattr(c, "entry_points", lambda group: [broken])
    with pytest.raises(InputError, match=r"'broken'.*does not load"):
        c.default_catalogue()
    other = EntryPoint("other", "math:pi", c.ENTRY_POINTS)
    monkeypatch.setattr(c, "entry_points", lambda group: [other])
    with pytest.raises(InputError, match=r"'other'.*not a KnownTable"):
        c.default_catalogue()
    with pytest.raises(InputError, match="not a KnownTable"):
        c.register_table("kafka")  # type: ignore[arg-type]
