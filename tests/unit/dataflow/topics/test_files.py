"""Topics in files: read once, whatever grows, stops and starts again, and refused when replaced."""

from __future__ import annotations

import csv
import io
import json
import random
import tempfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from arroyo_dagster.dataflow.definition.types import ScalarType
from arroyo_dagster.dataflow.topics import lines, rows
from arroyo_dagster.dataflow.topics.cells import Shape
from arroyo_dagster.dataflow.topics.files import FileSource, Format
from arroyo_dagster.dataflow.topics.folders import LocalFolder, folder_at
from arroyo_dagster.dataflow.topics.lines import CsvRows, Lines, record_ends
from arroyo_dagster.dataflow.topics.rows import ParquetRows
from arroyo_dagster.errors import FormatError, InputError, NotFoundError, ProtocolError
from arroyo_dagster.state.model.ids import StatePath
from arroyo_dagster.state.storage.remote.open import open_store
from tests.reading import read_on, records, stored, values


def source(path: Path, holds: Format | None = None, **options: Any) -> FileSource:
    return FileSource("words", LocalFolder(str(path)), holds or Lines(), **options)


def csv_rows(**types: ScalarType) -> CsvRows:
    return CsvRows(Shape(fields=types or None).from_cells)


# ---- lines ---------------------------------------------------------------------------------------


def test_lines_are_records_and_blank_ones_are_none(tmp_path: Path) -> None:
    file = tmp_path / "words.jsonl"
    file.write_bytes(b'\xef\xbb\xbf"a"\r\n\n"b"\n   \n"c"')
    found, end = read_on(source(file), {})
    assert found == [b'"a"', b'"b"', b'"c"']
    assert source(file).exhausted(end)


_PIECES = [*(bytes([one]) for one in b"a \t\r\n\0\v\xff"), b"\r\n", b"\xef\xbb\xbf", b"x" * 90]


@given(st.lists(st.sampled_from(_PIECES), max_size=40), st.integers(1, 9))
def test_lines_are_those_of_bytes_however_they_are_cut(pieces: list[bytes], room: int) -> None:
    """In blocks of 64 bytes and epochs of a few lines; the model is `bytes.split`."""
    data = b"".join(pieces)
    expected, at = [], 0
    for line in data.split(b"\n"):
        text = line.removeprefix(b"\xef\xbb\xbf") if at == 0 else line
        if text.strip(b"\r\n\t\v\f "):
            expected.append((at, text.rstrip(b"\r")))
        at += len(line) + 1
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(lines, "BLOCK_BYTES", 64)
        file = Path(folder, "words")
        file.write_bytes(data)
        read, found = source(file, rows_per_epoch=room), []
        offset = read.initial_offset()
        while (end := read.latest_offset(offset)) != offset:
            found += [(row["offset"], row["value"]) for row in records(read, offset, end)]
            offset = end
    assert found == expected


def test_an_epoch_takes_what_it_is_told_and_no_more(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("".join(f"{n}\n" for n in range(10)))
    (tmp_path / "b").write_text("10\n11\n")
    read = source(tmp_path, rows_per_epoch=4)
    offset, epochs = read.initial_offset(), []
    while (end := read.latest_offset(offset)) != offset:
        epochs.append(values(read, offset, end))
        offset = end
    assert [len(epoch) for epoch in epochs] == [4, 4, 4]
    assert [value for epoch in epochs for value in epoch] == [b"%d" % n for n in range(12)]


def test_a_record_says_where_it_was_found(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("one\ntwo\n")
    (tmp_path / "b").write_text("three\n")
    read = source(tmp_path)
    found = records(read, {}, read.latest_offset({}))
    assert [(row["partition"], row["offset"]) for row in found] == [(0, 0), (0, 4), (1, 0)]
    assert {row["timestamp"] for row in found} == {None}


def test_a_line_without_an_end_waits_where_more_may_come(tmp_path: Path) -> None:
    file = tmp_path / "words"
    file.write_text("one\ntw")
    follow = source(file, follow=True)
    found, offset = read_on(follow, {})
    assert (found, follow.exhausted(offset)) == ([b"one"], False)
    with file.open("a") as more:
        more.write("o\nthree\n")
    assert read_on(follow, offset)[0] == [b"two", b"three"]


def test_a_last_line_that_was_taken_and_then_continued_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "words"
    file.write_text("one\ntw")
    _, offset = read_on(source(file), {})
    with file.open("a") as more:
        more.write("o\n")
    with pytest.raises(ProtocolError, match="continued") as raised:
        source(file).latest_offset(offset)
    assert raised.value.facts["position"] == 6
    file.write_text("one\ntw\nthree\n")
    assert read_on(source(file), offset)[0] == [b"three"]


@pytest.mark.parametrize(
    ("content", "words"), [("on", "shorter"), ("two\none\nthree\n", "changed")]
)
def test_a_file_that_is_another_now_is_refused(tmp_path: Path, content: str, words: str) -> None:
    file = tmp_path / "words"
    file.write_text("one\ntwo\n")
    _, offset = read_on(source(file), {})
    file.write_text(content)
    with pytest.raises(ProtocolError, match=words) as raised:
        source(file).latest_offset(offset)
    assert (raised.value.facts["file"], bool(raised.value.next_step)) == ("words", True)


def test_a_file_with_an_earlier_name_that_comes_later_is_read(tmp_path: Path) -> None:
    (tmp_path / "b").write_text("b\n")
    found, offset = read_on(source(tmp_path), {})
    (tmp_path / "a").write_text("a\n")
    (tmp_path / "_making").write_text("x\n")
    (tmp_path / ".hidden").write_text("x\n")
    (tmp_path / "folder").mkdir()
    assert (found, read_on(source(tmp_path), offset)[0]) == ([b"b"], [b"a"])


def test_a_file_that_vanished_is_not_read_again_when_it_is_back(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("a\n")
    (tmp_path / "b").write_text("b\n")
    _, offset = read_on(source(tmp_path), {})
    (tmp_path / "a").unlink()
    (tmp_path / "b").write_text("b\nc\n")
    found, offset = read_on(source(tmp_path), offset)
    (tmp_path / "a").write_text("a\n")
    assert (found, read_on(source(tmp_path), offset)[0]) == ([b"c"], [])


def test_lines_longer_than_a_block_are_read_whole(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(lines, "BLOCK_BYTES", 7)
    file = tmp_path / "words"
    file.write_text("a" * 50 + "\nbc\n" + "d" * 20)
    assert read_on(source(file, rows_per_epoch=1), {})[0] == [b"a" * 50, b"bc", b"d" * 20]
    monkeypatch.setattr(lines, "LONGEST_BYTES", 30)
    with pytest.raises(FormatError, match="longer than"):
        source(file).latest_offset({})


@pytest.mark.parametrize("name", ["words.jsonl.gz", "words.zst"])
def test_compressed_files_are_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"\x1f\x8b")
    with pytest.raises(InputError, match="compressed") as raised:
        source(tmp_path)
    assert raised.value.facts["topic"] == "words"


def test_a_path_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="no such file") as raised:
        source(tmp_path / "nowhere")
    assert raised.value.facts["topic"] == "words"


@given(seed=st.integers(0, 2**32), rows=st.integers(1, 5))
def test_whatever_grows_and_stops_each_line_comes_once(seed: int, rows: int) -> None:
    """Files appear, grow by halves of lines, runs forget what they had not published."""
    chance = random.Random(seed)
    with tempfile.TemporaryDirectory() as name:
        folder, written, found = Path(name), 0, []
        offset: dict[str, Any] = {}
        for _ in range(30):
            action = chance.random()
            if action < 0.5:
                with (folder / chance.choice("abcd")).open("a") as file:
                    for _ in range(chance.randrange(4)):
                        file.write(f"line-{written}\n" + "\n" * chance.randrange(2))
                        written += 1
            else:
                read = source(folder, follow=chance.random() < 0.5, rows_per_epoch=rows)
                end = stored(read.latest_offset(offset))
                epoch = values(read, offset, end)
                assert epoch == values(source(folder), offset, end)  # the same rows again
                if action < 0.9:  # else killed before it was published
                    found += epoch
                    offset = end
        found += read_on(source(folder), offset)[0]
        assert sorted(found) == sorted(b"line-%d" % n for n in range(written))


# ---- CSV -----------------------------------------------------------------------------------------


def test_csv_cells_become_objects_of_the_declared_types(tmp_path: Path) -> None:
    file = tmp_path / "rows.csv"
    file.write_text('name,count,share,seen,note\n"a, ""b""",3,0.5,TRUE,"two\nlines"\nc,,x,maybe,\n')
    shape = csv_rows(
        name=ScalarType.STRING,
        count=ScalarType.U32,
        share=ScalarType.F64,
        seen=ScalarType.BOOL,
        note=ScalarType.STRING,
    )
    found, _ = read_on(source(file, shape), {})
    assert [json.loads(value) for value in found] == [
        {"name": 'a, "b"', "count": 3, "share": 0.5, "seen": True, "note": "two\nlines"},
        {"name": "c", "share": "x", "seen": "maybe", "note": ""},
    ]


def test_csv_goes_on_in_the_middle_of_a_file_and_keeps_its_header(tmp_path: Path) -> None:
    file = tmp_path / "rows.csv"
    file.write_text("a,b\n1,2\n3,4\n")
    _, offset = read_on(source(file, csv_rows()), {})
    with file.open("a") as more:
        more.write('5,"6\n7"\n')
    found, _ = read_on(source(file, csv_rows()), offset)
    assert [json.loads(value) for value in found] == [{"a": "5", "b": "6\n7"}]


def test_a_csv_of_one_column_is_a_topic_of_texts(tmp_path: Path) -> None:
    file = tmp_path / "rows.csv"
    file.write_text("word\nto\nbe\n")
    assert read_on(source(file, csv_rows()), {})[0] == [b'"to"', b'"be"']
    raw = CsvRows(Shape(raw=True).from_cells)
    assert read_on(source(file, raw), {})[0] == [b"to", b"be"]


@pytest.mark.parametrize(
    ("rows", "words"), [("1\n", "1 cells"), ("1,2,3\n", "3 cells"), ('1,"2\n', "not CSV")]
)
def test_a_csv_row_that_does_not_fit_is_named(tmp_path: Path, rows: str, words: str) -> None:
    file = tmp_path / "rows.csv"
    file.write_text("a,b\n" + rows)
    with pytest.raises(FormatError, match=words) as raised:
        read_on(source(file, csv_rows()), {})
    assert (raised.value.facts["file"], raised.value.facts["position"]) == ("rows.csv", 4)


@given(st.lists(st.lists(st.text(st.sampled_from('a",\n\r \u2028')), min_size=2, max_size=2)))
def test_any_csv_that_python_writes_is_cut_where_its_rows_end(rows: list[list[str]]) -> None:
    text = io.StringIO(newline="")
    csv.writer(text, lineterminator="\n", quoting=csv.QUOTE_ALL).writerows([["a", "b"], *rows])
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "rows.csv").write_bytes(text.getvalue().encode())
        found, _ = read_on(source(Path(name), csv_rows(), rows_per_epoch=2), {})
    cells = [dict(zip("ab", row, strict=True)) for row in rows]
    assert [json.loads(value) for value in found] == cells
    assert len(record_ends(text.getvalue().encode(), quoted=True)) == len(rows) + 1


# ---- Parquet -------------------------------------------------------------------------------------


def rows_of(path: Path, first: int, count: int) -> None:
    times = pa.array(range(first, first + count), pa.timestamp("ns"))
    nested = pa.array([{"at": at} for at in range(count)], pa.struct([("at", pa.timestamp("ns"))]))
    table = pa.table({"n": range(first, first + count), "at": times, "in": nested})
    pq.write_table(table, path, row_group_size=3)


def test_parquet_rows_are_objects_and_times_are_milliseconds(tmp_path: Path) -> None:
    rows_of(tmp_path / "b.parquet", 5_000_000, 7)
    rows_of(tmp_path / "a.parquet", 0, 2)
    holds = ParquetRows(Shape().from_row)
    read = source(tmp_path, holds, rows_per_epoch=4)
    found, end = read_on(read, {})
    made = [json.loads(value) for value in found]
    assert [row["n"] for row in made] == [0, 1, *range(5_000_000, 5_000_007)]
    assert made[2] == {"n": 5_000_000, "at": 5, "in": {"at": 0}}
    assert read.exhausted(end)


@pytest.mark.parametrize("data", [b"x\ny\n", b"a\n", b"x\ny\nz\n"], ids=["same", "less", "more"])
def test_other_records_are_refused_at_the_start_of_a_run(tmp_path: Path, data: bytes) -> None:
    """Also of a file that was read to its end, of which a run asks no more."""
    file = tmp_path / "words.txt"
    file.write_bytes(b"a\nb\n")
    _, end = read_on(source(file), {})
    source(file).check_offset(stored(end))
    file.write_bytes(data)
    with pytest.raises(ProtocolError, match=r"changed|shorter") as error:
        source(file).check_offset(stored(end))
    assert error.value.next_step


def test_a_parquet_file_that_is_replaced_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "a.parquet"
    rows_of(file, 0, 7)
    holds = ParquetRows(Shape().from_row)
    offset = source(file, holds, rows_per_epoch=2).latest_offset({})
    rows_of(file, 1, 9)
    with pytest.raises(ProtocolError, match="replaced"):
        source(file, holds).latest_offset(offset)
    file.write_bytes(b"PAR1 not at all")
    with pytest.raises(FormatError, match="cannot be read as Parquet"):
        source(file, ParquetRows(Shape().from_row)).latest_offset({})


# ---- parts ---------------------------------------------------------------------------------------


@given(
    texts=st.lists(st.text("ab\r\u00e9 ", max_size=9), min_size=1, max_size=40),
    end=st.sampled_from(["", "\n", "\r\n"]),
    part_bytes=st.integers(1, 40),
    per_epoch=st.integers(1, 50),
)
def test_lines_read_in_parts_are_those_read_at_once(
    texts: list[str], end: str, part_bytes: int, per_epoch: int
) -> None:
    def found() -> list[dict[str, Any]]:
        read = source(file, rows_per_epoch=per_epoch)
        offset: dict[str, Any] = {}
        taken: list[dict[str, Any]] = []
        while (until := read.latest_offset(offset)) != offset:
            taken += records(read, offset, until)
            offset = until
        return taken

    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        file = Path(folder, "words.jsonl")
        file.write_bytes(((end or "\n").join(texts) + end).encode())
        whole = found()
        patch.setattr(lines, "MIN_SPLIT_BYTES", part_bytes)
        patch.setattr(lines, "_PROBE_BYTES", 2)
        assert found() == whole
        end_of_file = file.stat().st_size
        assert len(source(file).partitions({}, {"file:words.jsonl": [end_of_file, 0, 0]})) <= 8


@pytest.mark.parametrize("raw", [False, True])
@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.binary()])
def test_rows_of_text_read_in_parts_are_those_read_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, raw: bool, kind: pa.DataType
) -> None:
    texts = pa.array([f"word {n}é" for n in range(50)]).cast(kind)
    pq.write_table(pa.table({"word": texts}), tmp_path / "a.parquet", row_group_size=16)
    shape = Shape(raw=raw)
    one_by_one = source(tmp_path, ParquetRows(shape.from_row))
    end = one_by_one.latest_offset({})
    expected = records(one_by_one, {}, end)
    monkeypatch.setattr(rows, "MIN_SPLIT_ROWS", 5)
    in_parts = source(tmp_path, ParquetRows(shape.from_row, raw=raw))
    assert len(in_parts.partitions({}, end)) == 8
    assert records(in_parts, {}, end) == expected


def test_a_missing_text_is_what_json_calls_it(tmp_path: Path) -> None:
    table = pa.table({"word": pa.array(["a", None, "b"])})
    pq.write_table(table, tmp_path / "a.parquet")
    read = source(tmp_path, ParquetRows(Shape(raw=True).from_row, raw=True))
    assert read_on(read, {})[0] == [b"a", b"null", b"b"]


# ---- elsewhere -----------------------------------------------------------------------------------


def test_a_directory_of_a_store_is_read_like_a_local_one() -> None:
    store = open_store("memory://topic-files")
    store.put(StatePath("a.jsonl"), b"1\n2\n")
    store.put(StatePath("b.jsonl"), b"3\n")
    store.put(StatePath("_staging/x/c.jsonl"), b"4\n")
    read = FileSource("words", folder_at("memory://topic-files"), Lines(), rows_per_epoch=2)
    assert read_on(read, {})[0] == [b"1", b"2", b"3"]
