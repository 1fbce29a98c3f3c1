"""Absurd numbers, times, sizes and documents that a person gives end in one message, and not in a
traceback: exit code 2 for a wrong command line, 1 for an error of this package."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from arroyo_dagster import OperatorCheckpoint, cli
from arroyo_dagster.cli.settings import Duration, NamedSetting
from arroyo_dagster.state.codec.metadata import encode_operator
from tests.commands import leaf_commands
from tests.compat import arroyo
from tests.formats import ExpiringTimeKeyConfig, ExpiringTimeKeyFiles, decode_operator

DIGITS = "9" * 5000
NUMBERS = (DIGITS, "-" + DIGITS, "-1", "nan", "inf", "1e30", str(10**30), "2300-01-01T00:00:00Z")
DURATIONS = (f"{DIGITS}d", "-1d", "nan", "1e30d", f"{10**30}d", "999999999d", "2300-01-01")
TIMES = ("2300-01-01T00:00:00Z", "0001-01-01T00:00:00Z", "9999-12-31T23:59:59Z", DIGITS, "nan")
JOB = "hourly_departures"
VALUES = {"kind": "maintenance", "epoch": "8", "time_text": "2013-01-05T00:00:00Z"}
"""Of required arguments that must be of some kind; a number is 2, and a text is `x`."""


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    return "file://" + arroyo.unpack("flights", tmp_path_factory.mktemp("flights"))


def run(*args: str, **options: Any) -> Result:
    return CliRunner().invoke(cli.main, list(args), **options)


def check_refused(result: Result, *codes: int) -> None:
    assert isinstance(result.exception, SystemExit), (result.exception, result.output)
    assert result.exit_code in codes, result.output
    errors = [line for line in result.output.splitlines() if "rror: " in line]
    assert [len(line) < 1000 for line in errors] == [True], result.output


# ---- the command line ----------------------------------------------------------------------------


def _values(kind: Any) -> Iterator[str]:
    if isinstance(kind, click.IntRange | click.FloatRange):
        yield from NUMBERS
    elif isinstance(kind, Duration):
        yield from DURATIONS
    elif isinstance(kind, NamedSetting):
        yield from (f"{name}={value}" for name in kind._fields for value in NUMBERS)


def _required(parameter: click.Parameter) -> str:
    if isinstance(parameter.type, click.Choice):
        return str(parameter.type.choices[0])
    if isinstance(parameter.type, click.IntRange):
        return "2"
    return VALUES.get(str(parameter.name), "x")


def _line(words: tuple[str, ...], command: click.Command, varied: str, value: str) -> list[str]:
    options, arguments = [], []
    for parameter in command.params:
        if parameter.name != varied and not parameter.required:
            continue
        given = value if parameter.name == varied else _required(parameter)
        if isinstance(parameter, click.Argument):
            arguments.append(given)
        elif parameter.opts[0].startswith("--"):
            options.append(f"{parameter.opts[0]}={given}")
        else:
            options += [parameter.opts[0], given]
    return [*words, *options, "--", *arguments]


@functools.cache
def _bounded() -> list[tuple[tuple[str, ...], click.Command, click.Parameter]]:
    return [
        (words, command, parameter)
        for words, command in leaf_commands(cli.main)
        for parameter in command.params
        if next(_values(parameter.type), None) is not None
    ]


def test_each_number_and_duration_of_a_command_is_bounded() -> None:
    for words, command, parameter in _bounded():
        for value in _values(parameter.type):
            result = run(*_line(words, command, str(parameter.name), value))
            assert result.exit_code == 2, (words, parameter.name, value[:40], result.output[-300:])
            check_refused(result, 2)
    assert len(_bounded()) > 90


def test_no_command_takes_an_unbounded_number() -> None:
    unbounded = [
        (" ".join(words), parameter.name)
        for words, command in leaf_commands(cli.main)
        for parameter in command.params
        if isinstance(parameter.type, type(click.INT) | type(click.FLOAT))
        and not type(parameter.type).__module__.startswith("arroyo_dagster")
    ]
    assert not unbounded


@pytest.mark.parametrize("text", TIMES)
def test_a_time_that_nanoseconds_cannot_hold_is_refused(
    url: str, tmp_path: Path, text: str
) -> None:
    lookup = tmp_path / "lookup"
    lookup.write_text("flights:0:5")
    shared = ("--url", url, "--assume", f"{JOB}=stopped")
    check_refused(run("edit", "watermark", JOB, text, *shared), 1)
    check_refused(run("edit", "retain", JOB, text, *shared), 1)
    of_time = ("--time", text, "--lookup", str(lookup))
    check_refused(run("edit", "offsets", JOB, *of_time, *shared), 1)
    assert run("verify", JOB, "--url", url).exit_code == 0


@pytest.mark.parametrize(
    "position", [DIGITS, f"+{DIGITS}", "+99999999999999999999", str(2**63), "-9999", "nan"]
)
def test_a_position_out_of_bounds_is_refused(url: str, position: str) -> None:
    shared = ("--url", url, "--assume", f"{JOB}=stopped")
    check_refused(run("edit", "offsets", JOB, f"all={position}", *shared), 1, 2)


def check_no_command_reads(file: Path, *shared: str) -> None:
    of_time = ("--time", "2013-01-05T00:00:00Z", "--lookup", str(file))
    check_refused(run("edit", "offsets", JOB, *of_time, *shared), 1)
    check_refused(run("gc", "run", "orphans", JOB, "--plan", str(file), *shared), 1)
    check_refused(run("gc", "plan", "orphans", JOB, "--listing", str(file), *shared), 1)
    check_refused(run("evolve", JOB, JOB, "--overrides", str(file), *shared), 1)


@pytest.mark.parametrize(
    "text", ["[" * 10**5, '{"0":' * 10**5, '{"0":' + "[" * 500 + "]" * 500 + "}"]
)
def test_deeply_nested_json_is_refused(url: str, tmp_path: Path, text: str) -> None:
    file = tmp_path / "deep.json"
    file.write_text(text)
    shared = ("--url", url, "--assume", f"{JOB}=stopped")
    check_no_command_reads(file, *shared)
    check_refused(run("edit", "set", JOB, "source_flights_0", "f", text, text, *shared), 1)
    check_refused(run("jobs", "--assume", f"@{file}", "--url", url), 1, 2)


def test_a_document_too_large_for_memory_is_refused_before_it_is_read(
    url: str, tmp_path: Path
) -> None:
    file = tmp_path / "large.json"
    with file.open("wb") as large:
        large.truncate(1 << 40)  # takes no space, and fits into no memory
    check_no_command_reads(file, "--url", url, "--assume", f"{JOB}=stopped")
    definition = run("sdf", "run", str(file))
    assert definition.exit_code == 1
    assert "is longer than" in definition.output
    check_refused(run("jobs", "--url", url, env={"ARROYO_DELETE_OPTIONS": str(file)}), 1)


def test_arguments_that_are_not_utf_8_are_a_wrong_command_line(url: str) -> None:
    check_refused(run("show", "\udcff\udcfe", "--url", url), 2)
    check_refused(run("pin", JOB, "8", "--reason", "\udcff", "--url", url), 2)
    check_refused(run("sdf", "run", "x" * 5000), 1)


# ---- metadata ------------------------------------------------------------------------------------

LAST = 2**64 // 1000
"""The watermark with which a bounded source of Arroyo ends, in microseconds: the year 2554."""
READERS = (
    *(("verify", JOB), ("show", JOB), ("show", JOB, "--json"), ("epochs", JOB)),
    *(("diff", f"{JOB}@7", f"{JOB}@8"), ("jobs",), ("health", "--level", "4")),
    *(("sql", "@watermarks", JOB), ("sql", "@growth", JOB), ("sql", "@restore", JOB)),
    *(("sql", "select * from watermarks"), ("sql", "select * from files")),
)


def _watermarks(micros: int, operator: OperatorCheckpoint) -> OperatorCheckpoint:
    if operator.min_watermark_micros is None:
        return operator
    return replace(operator, min_watermark_micros=micros, max_watermark_micros=micros)


def _merges(operator: OperatorCheckpoint) -> OperatorCheckpoint:
    tables = {
        name: replace(
            files, files=tuple(replace(one, compaction_generation=2**64 - 1) for one in files.files)
        )
        if isinstance(files, ExpiringTimeKeyFiles)
        else files
        for name, files in operator.tables.items()
    }
    return replace(operator, tables=tables)


def _keys(operator: OperatorCheckpoint) -> OperatorCheckpoint:
    configs = {
        name: replace(
            config,
            config=replace(
                config.config, schema=replace(config.config.schema, key_indices=(2**32 - 1,))
            ),
        )
        if isinstance(config.config, ExpiringTimeKeyConfig)
        else config
        for name, config in operator.configs.items()
    }
    return replace(operator, configs=configs)


@pytest.mark.parametrize(
    "change",
    [
        functools.partial(_watermarks, LAST),
        functools.partial(_watermarks, 2**64 - 1),
        _merges,
        _keys,
    ],
    ids=["last watermark", "largest watermark", "merges", "key columns"],
)
def test_numbers_out_of_bounds_in_metadata_end_in_no_traceback(tmp_path: Path, change: Any) -> None:
    url = "file://" + arroyo.unpack("flights", tmp_path)
    newest = tmp_path / JOB / "checkpoints" / "checkpoint-0000008"
    for file in newest.glob("operator-*/metadata"):
        operator = decode_operator(file.read_bytes(), str(file))
        file.write_bytes(encode_operator(change(operator)))
    for command in READERS:
        result = run(*command, "--url", url)
        assert result.exception is None or isinstance(result.exception, SystemExit), command
