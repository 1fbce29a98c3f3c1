"""`arroyo-state sdf run`, `show state` and `sql` as a shell sees them, on the examples."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from arroyo_dagster import cli

PROJECT = Path(__file__).parents[3]

EXAMPLES = Path(__file__).parents[3] / "examples" / "sdf"
WORDS = EXAMPLES / "words"
TEMPERATURE = EXAMPLES / "temperature"


def run(*args: object, stdin: str | None = None) -> Result:
    runner = CliRunner()
    return runner.invoke(cli.main, ["sdf", *map(str, args)], input=stdin, catch_exceptions=False)


def started(folder: Path, url: Path, *flags: object, ends_with: int = 0) -> Result:
    files = (folder / "dataflow.yaml", "--bindings", folder / "bindings.yaml")
    result = run("run", *files, "--url", url, *flags)
    assert result.exit_code == ends_with, result.stderr
    return result


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The words example, run once: its definition, and where its state lies."""
    url = tmp_path_factory.mktemp("words")
    started(WORDS, url)
    return WORDS / "dataflow.yaml", url


def test_a_run_prints_records_to_stdout_and_what_it_did_to_stderr(tmp_path: Path) -> None:
    result = started(WORDS, tmp_path)
    answers = [json.loads(line) for line in result.stdout.splitlines()]
    assert [(one["word"], one["count"]) for one in answers] == [
        ("river", 3),
        ("rain", 4),
        ("boat", 0),
    ]
    assert "count-words/count_word  39" in result.stderr
    assert "every source has ended" in result.stderr
    again = started(WORDS, tmp_path)
    assert again.stdout == ""  # exactly once
    assert "split 0, count-words 0, look-up 0" in again.stderr


def test_show_state_lists_every_namespace(words: tuple[Path, Path]) -> None:
    shown = run("show", words[0], "--url", words[1]).stdout.splitlines()
    assert shown[0] == " Namespace                       Keys  Type"
    assert " count-words/hits/state          22    u32" in shown
    assert " count-words/word-stats/state    22    u32" in shown
    assert " count-words/words/topic.offset  1     offset" in shown
    assert " split/split_sentence/metrics    1     table" in shown
    filtered = run("show", words[0], "--filter", "/state$", "--url", words[1]).stdout
    assert [line.split()[0] for line in filtered.splitlines()[1:]] == [
        "count-words/hits/state",
        "count-words/word-stats/state",
    ]


def test_show_state_shows_the_rows_of_both_kinds(words: tuple[Path, Path]) -> None:
    at = ("--url", words[1])
    rows = run("show", words[0], "count-words/word-stats/state", "--key", "river", *at)
    assert rows.stdout == " Key    Window  count  longest-sentence\n river  *       3      12\n"
    cells = run("show", words[0], "count-words/hits", "--filter", "^r", *at)
    assert cells.stdout == (
        " Key    Window  Value\n rain   *       4\n river  *       3\n road   *       1\n"
        " roof   *       1\n rose   *       1\n"
    )
    stats = run("show", words[0], "split/split_sentence/metrics", *at)
    assert stats.stdout == " Key    Window  failed  succeeded\n stats  *       0       4\n"
    offset = run("show", words[0], "look-up/asked/topic.offset", *at)
    assert offset.stdout == " Key        Window  Value\n asked.txt  *       16\n"
    document = json.loads(
        run("show", words[0], "count-words/hits", "--key", "rain", *at, "--json").stdout
    )
    assert document["rows"] == [{"key": "rain", "window": "*", "values": {"Value": 4}}]


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["count-words/hit/state"], "nearest=count-words/hits/state"),
        (["nothing/like/it"], "there is no namespace `nothing/like/it`"),
        (["--filter", "("], "not a regular expression"),
    ],
)
def test_e47_names_the_nearest_namespace(
    words: tuple[Path, Path], args: list[str], said: str
) -> None:
    result = run("show", words[0], *args, "--url", words[1])
    assert result.exit_code == 1
    assert "number=E47" in result.stderr
    assert said in result.stderr


def test_sql_prints_a_frame(words: tuple[Path, Path]) -> None:
    query = "select _key, count from word_stats order by count desc, _key limit 2"
    assert run("sql", words[0], query, "--url", words[1]).stdout == (
        "shape: (2, 2)\n"
        "┌──────┬───────┐\n"
        "│ _key ┆ count │\n"
        "│ ---  ┆ ---   │\n"
        "│ str  ┆ u32   │\n"
        "╞══════╪═══════╡\n"
        "│ the  ┆ 9     │\n"
        "│ rain ┆ 4     │\n"
        "└──────┴───────┘\n"
    )
    document = json.loads(run("sql", words[0], query, "--url", words[1], "--json").stdout)
    assert document["rows"] == [["the", 9], ["rain", 4]]
    star = run("sql", words[0], "select * from word_stats where count > 9", "--url", words[1])
    assert star.stdout.splitlines()[2] == "│ _key ┆ count ┆ longest-sentence │"
    assert star.stdout.splitlines()[5].startswith("╞")
    assert star.stdout.splitlines()[6].startswith("└")


@pytest.mark.parametrize(
    "query", ["select * from nothing", "select nothing from word_stats", "drop table word_stats"]
)
def test_e46_a_query_that_cannot_be_answered(words: tuple[Path, Path], query: str) -> None:
    result = run("sql", words[0], query, "--url", words[1])
    assert (result.exit_code, "E46" in result.stderr) == (1, True)


def test_sql_mode_takes_a_query_a_line(words: tuple[Path, Path]) -> None:
    lines = ".help\nshow tables\n.nonsense\nselect nonsense\n\nselect 1 as one\n.exit\nselect 2\n"
    result = run("sql", words[0], "--url", words[1], stdin=lines)
    assert result.exit_code == 0
    assert "SQL over states" in result.stdout
    assert "│ word_stats │" in result.stdout
    assert "list the commands" in result.stdout
    assert result.stdout.count("shape:") == 3
    assert "E47" in result.stderr
    assert "E46" in result.stderr


def test_a_run_that_nothing_is_bound_for_names_every_topic(tmp_path: Path) -> None:
    result = run("run", WORDS / "dataflow.yaml", "--url", tmp_path)
    assert result.exit_code == 1
    assert "2 topics have no source: sentences, asked" in result.stderr
    assert "--source sentences=jsonl:PATH" in result.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--source", "asked"], "TOPIC=KIND:PATH"),
        (["--source", "asked=rate:1", "--source", "asked=rate:2"], "two sources of one topic"),
        (["-e", "NAME"], "NAME=VALUE"),
        (["--bind", "x"], "NAME=module:function"),
        (["--bindings", "nowhere.yaml"], "no such bindings file"),
    ],
)
def test_a_flag_that_is_none_is_told(tmp_path: Path, flags: list[str], said: str) -> None:
    result = run("run", WORDS / "dataflow.yaml", "--url", tmp_path, *flags)
    assert result.exit_code == 1
    assert re.search(said, result.stderr, re.IGNORECASE)


def test_failing_records_are_counted_or_end_the_run(tmp_path: Path) -> None:
    bad = tmp_path / "floors.jsonl"
    bad.write_text('0\n"x"\n1\n')
    flags: list[Any] = ["--source", f"floors-asked=jsonl:{bad}", "--json"]
    sink = ["--sink", f"floor-reports=jsonl:{tmp_path}/o/"]
    skipped = started(TEMPERATURE, tmp_path / "skip", *flags, *sink, ends_with=4)
    document = json.loads(skipped.stdout[skipped.stdout.index('{\n  "dataflow"') :])
    metrics = document["metrics"]
    assert document["failed"] == {"floors/floors-asked": 1}
    assert (metrics["floors/floors-asked"]["failed"], metrics["floors/report_floor"]) == (
        1,
        {"failed": 0, "succeeded": 2},
    )
    fatal = run(
        *("run", TEMPERATURE / "dataflow.yaml", "--bindings", TEMPERATURE / "bindings.yaml"),
        *("--url", tmp_path / "fail", "--on-error", "fail", *flags),
    )
    assert fatal.exit_code == 1
    assert json.loads(fatal.stderr.splitlines()[-1])["error"]["type"] == "StepFailed"


PICKY = """
apiVersion: 0.6.0
meta: {name: picky, version: 0.1.0, namespace: tests}
topics:
  words: {schema: {value: {type: string, converter: raw}}}
  answers: {schema: {value: {type: string, converter: raw}}}
services:
  shout:
    sources: [{type: topic, id: words}]
    transforms:
      - operator: map
        run: |
          def shout(word):
              assert word not in env["refused"], f"no {word}"
              return word.upper()
    sinks: [{type: topic, id: answers}]
"""


def test_dead_letters_are_listed_and_replayed(tmp_path: Path) -> None:
    file, words = tmp_path / "dataflow.yaml", tmp_path / "words.txt"
    file.write_text(PICKY)
    words.write_text("a\nb\nc\n")
    common = (file, "--url", tmp_path / "state", "--sink", f"answers=jsonl:{tmp_path}/out.txt")
    letters = ("--sink", f"dead-letters=jsonl:{tmp_path}/letters.jsonl")
    source = ("--source", f"words=jsonl:{words}")
    first = run("run", *common, *source, *letters, "--on-error", "dead-letter", "-e", "refused=b")
    assert first.exit_code == 4
    assert "failed in this run: shout/shout 1; `sdf replay` processes them again" in first.stderr
    (letter,) = map(json.loads, (tmp_path / "letters.jsonl").read_text().splitlines())
    assert (letter["file"], letter["offset"], letter["record"]) == ("words.txt", 2, "b")
    assert letter["reason"] == (
        'AssertionError: no b; in line 2 of the body: `word not in env["refused"]`'
    )

    listed = run("replay", file, "--url", tmp_path / "state", "--dry-run")
    assert "shout" in listed.stdout
    assert "AssertionError: no b" in listed.stdout
    assert "words words.txt 0/2" in listed.stdout
    again = run("replay", *common, *letters, "-e", "refused=")
    assert (again.exit_code, "every source has ended" in again.stderr) == (0, True), again.stderr
    assert (tmp_path / "out.txt").read_text() == "A\nC\nB\n"
    assert (
        json.loads(run("replay", file, "--url", tmp_path / "state", "--dry-run", "--json").stdout)
        == []
    )
    last = run("run", *common, *source, "-e", "refused=")
    assert (last.exit_code, (tmp_path / "out.txt").read_text()) == (0, "A\nC\nB\n")


def test_a_run_that_would_consume_all_in_vain_ends_with_1(tmp_path: Path) -> None:
    file, words = tmp_path / "dataflow.yaml", tmp_path / "words.txt"
    file.write_text(PICKY.replace("env[", "evn["))
    words.write_text("a\nb\n")
    common = (file, "--url", tmp_path / "state", "--source", f"words=jsonl:{words}")
    wrong = run("run", *common, "--sink", f"answers=jsonl:{tmp_path}/out.txt")
    assert wrong.exit_code == 1
    file.write_text(PICKY)
    sink = ("--sink", f"answers=jsonl:{tmp_path}/out.txt")
    assert run("run", *common, *sink, "-e", "refused=").exit_code == 0
    assert (tmp_path / "out.txt").read_text() == "A\nB\n"


def test_a_service_behind_another_consumes_nothing_in_vain(tmp_path: Path) -> None:
    """The records between two services have ended when the first has."""
    folder = shutil.copytree(PROJECT / "examples/sdf/words", tmp_path / "words")
    file, right = folder / "dataflow.yaml", (folder / "dataflow.yaml").read_text()
    wrong = right.replace("row.count += 1", "row.count += int(word.text)")
    assert wrong != right
    words = [str(file), "--bindings", str(folder / "bindings.yaml"), "--url", f"{tmp_path}/state"]
    file.write_text(wrong)
    failed = CliRunner().invoke(cli.main, ["sdf", "run", *words])
    assert failed.exit_code == 1
    assert "count_word failed on each of the 39 records" in failed.stderr
    file.write_text(right)
    assert CliRunner().invoke(cli.main, ["sdf", "run", *words]).exit_code == 0
    query = "select sum(count) as total from word_stats"
    found = CliRunner().invoke(
        cli.main, ["sdf", "sql", str(file), query, "--url", f"{tmp_path}/state", "--json"]
    )
    assert json.loads(found.stdout)["rows"] == [[39]]


# ---- clean ---------------------------------------------------------------------------------------


def counted(url: Path) -> dict[str, Any]:
    """The metrics of every step since the job began, and the words, as a user sees them."""
    shown = run("show", WORDS / "dataflow.yaml", "count-words/word-stats/state",
                "--json", "--url", url)  # fmt: skip
    return {row["key"]: row["values"] for row in json.loads(shown.stdout)["rows"]}


def test_a_cleaned_dataflow_of_several_services_comes_to_the_same_again(tmp_path: Path) -> None:
    first = started(WORDS, tmp_path)
    before = counted(tmp_path)
    file = (WORDS / "dataflow.yaml", "--url", tmp_path)
    plan = run("clean", *file)
    assert plan.exit_code == 0
    assert re.search(r"count-words\s+state hits\s+22", plan.stdout)
    assert re.search(r"split\s+topic sentences\s+-\s+read from its beginning", plan.stdout)
    assert "Nothing was changed. To carry it out: add --yes" in plan.stdout
    assert counted(tmp_path) == before
    done = run("clean", *file, "--yes")
    assert "examples.words/count-words: cleaned in epoch" in done.stdout
    assert counted(tmp_path) == {}
    assert "There is nothing to remove." in run("clean", *file).stdout
    back = run("clean", *file, "--undo", "--yes", "--json")
    assert set(json.loads(back.stdout)["epochs"]) == {"split", "count-words", "look-up"}
    assert counted(tmp_path) == before
    assert started(WORDS, tmp_path).stdout == ""
    run("clean", *file, "--yes")
    again = started(WORDS, tmp_path)
    assert counted(tmp_path) == before  # records between services are not read twice
    assert again.stdout == first.stdout
    assert "count-words/count_word  39" in again.stderr


def test_one_state_is_cleaned_by_its_name_and_wrong_ones_are_refused(tmp_path: Path) -> None:
    started(WORDS, tmp_path)
    file = (WORDS / "dataflow.yaml", "--url", tmp_path)
    document = json.loads(run("clean", *file, "--state", "hits", "--json").stdout)
    assert document["plan"][0]["states"] == [{"name": "hits", "rows": 22, "declared": True}]
    assert "do not count again" in document["plan"][0]["warnings"][0]
    wrong = CliRunner().invoke(cli.main, ["sdf", "clean", *map(str, file), "--state", "hit"])
    assert wrong.exit_code == 1
    assert "did you mean" in wrong.output
    both = run("clean", *file, "--undo", "--state", "hits")
    assert both.exit_code == 2
