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
from arroyo_dagster.dataflow.topics.folders import LocalFolder
from arroyo_dagster.dataflow.topics.lines import CsvRows, Lines, record_ends
from arroyo_dagster.dataflow.topics.rows import ParquetRows
from arroyo_dagster.dataflow.topics.wiring import FileSource, Format
from arroyo_dagster.errors import FormatError, ProtocolError
from tests.reading import read_on, records, stored, values


def source(path: Path, holds: Format | None = None, **options: Any) -> FileSource:
    return FileSource("words", LocalFolder(str(path)), holds or Lines(), **options)


def csv_rows(**types: ScalarType) -> CsvRows:
    return CsvRows(Shape(fields=types or None).from_cells)


# ---- lines ---------------------------------------------------------------------------------------


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


def test_a_file_that_vanished_is_not_read_again_when_it_is_back(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("a\n")
    (tmp_path / "b").write_text("b\n")
    _, offset = read_on(source(tmp_path), {})
    (tmp_path / "a").unlink()
    (tmp_path / "b").write_text("b\nc\n")
    found, offset = read_on(source(tmp_path), offset)
    (tmp_path / "a").write_text("a\n")
    assert (found, read_on(source(tmp_path), offset)[0]) == ([b"c"], [])


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


def test_csv_goes_on_in_the_middle_of_a_file_and_keeps_its_header(tmp_path: Path) -> None:
    file = tmp_path / "rows.csv"
    file.write_text("a,b\n1,2\n3,4\n")
    _, offset = read_on(source(file, csv_rows()), {})
    with file.open("a") as more:
        more.write('5,"6\n7"\n')
    found, _ = read_on(source(file, csv_rows()), offset)
    assert [json.loads(value) for value in found] == [{"a": "5", "b": "6\n7"}]


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
