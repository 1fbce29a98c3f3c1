"""Private columns on the command line: no option, query or file shows a value of them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from arroyo_dagster import MemoryStore, cli, configure, global_table_config
from arroyo_dagster.state.planning.privacy import UNKNOWN_BYTES
from tests.dataflows import Flow, builder, definition, row_of
from tests.fabricated import OPERATOR, pair_files, publish
from tests.formats import GlobalKeyedFiles
from tests.jobs import run_word_job

URL = "memory://cli-private"
PEOPLE = ("ann@example.com", "bob@example.com")
KEEP = "row = counts()\nrow.email = record\nrow.n += 1\nrow.update()"


@pytest.fixture(scope="module", autouse=True)
def words() -> Iterator[None]:
    run_word_job(MemoryStore("cli-private"), rows=8, sinks=0, keep_epochs=None)
    yield
    configure(None)


def run(*args: object, env: dict[str, str | None] | None = None, stdin: str = "") -> Result:
    return CliRunner().invoke(cli.main, [str(one) for one in args], env=env, input=stdin)


def rows(*args: str, env: dict[str, str | None] | None = None) -> list[dict[str, object]]:
    result = run("rows", "main", "keep", "rows", *args, "--json", "--url", URL, env=env)
    assert result.exit_code == 0, result.stderr
    found: list[dict[str, object]] = json.loads(result.stdout)
    return found


def is_masked(value: object) -> bool:
    return str(value).startswith(("private:", "(private"))


# ---- rows ----------------------------------------------------------------------------------------


def test_option_variable_and_file_add_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert not any(is_masked(one) for row in rows() for one in row.values())
    assert all(is_masked(row["word"]) for row in rows("--private", "word"))
    env = {"ARROYO_PRIVATE_COLUMNS": "keep.rows.word, other.*"}
    assert all(is_masked(row["word"]) for row in rows("--private", "nothing", env=env))
    Path("arroyo-state.toml").write_text('private = ["main.rows.word"]\n')
    for given in ([], ["--private", "_timestamp"]):
        assert all(is_masked(row["word"]) for row in rows(*given))
    assert all(is_masked(row["_timestamp"]) for row in rows("--private", "_timestamp", env=env))


@pytest.mark.parametrize("typed", [True, False])
def test_bytes_that_say_nothing_of_their_content_are_masked(typed: bool) -> None:
    store = MemoryStore(f"cli-private-{typed}")
    types = {"key": str, "value": bytes} if typed else {}
    config = global_table_config("people", **types)
    files = pair_files(store, config, [({b"\x01k": b"\x03ann"}, 0)])
    publish(store, {config: GlobalKeyedFiles(files=files)})
    shown = ("rows", "made", OPERATOR, "people", "--json", "--url", store.url)
    assert b"ann".hex() in run(*shown).stdout
    result = run(*shown, "--private", "customers.email")
    assert result.exit_code == 0, result.output
    assert b"ann".hex() not in result.output
    assert json.loads(result.stdout)[0] == (
        {"key": "k", "value": UNKNOWN_BYTES}
        if typed
        else {"key_hex": UNKNOWN_BYTES, "value_hex": UNKNOWN_BYTES}
    )


# ---- states of dataflows -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def people(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A state with private keys and a private column: its definition, and where it lies."""
    folder = tmp_path_factory.mktemp("people")
    text = definition(builder(KEEP, value=row_of(email="string", n="u32")), converter="raw")
    flow = Flow(text, store=MemoryStore("cli-people"))
    flow.send("words", [PEOPLE[0], PEOPLE[1], PEOPLE[0]])
    file = folder / "dataflow.yaml"
    file.write_text(text)
    return file, flow.store.url


HOSTILE = (
    "select * from counts",
    "select email as name from counts",
    "select upper(email) || 'x' as e, n from counts",
    "select concat(_key, '') k from counts order by _key",
    "select substr(email, 1, 3) from counts",
    "select length(email) from counts",
    "select n from counts where email = 'ann@example.com'",
    "select n from counts where _key like 'ann%'",
    "select _key from counts where _key = 'ann@example.com'",
    "select max(email), min(_key), count(distinct email) from counts",
    "select a._key, b.email from counts a join counts b on a._key = b._key",
    "with t as (select email e from counts) select e from t union all select _key from counts",
    "select case when email > 'b' then 1 else 0 end c from counts",
    "select cast(email as int) from counts",
    "select strptime(_key, '%Y') from counts",
    "explain select email from counts where email > 'a'",
    "show tables",
    "select first(email) over (partition by n) from counts",
    "select * from read_parquet('{url}/**')",
    "select * from `read_parquet`('{url}/**')",
    "select * from \"READ_CSV\" /* x */ ('{url}')",
    "select E'\\'' as a from read_json('{url}')",
)


@pytest.mark.parametrize("query", HOSTILE)
def test_no_query_shows_or_tests_a_private_value(people: tuple[Path, str], query: str) -> None:
    file, url = people
    private = ("--private", "counts.email", "--private", "counts._key")
    result = run("sdf", "sql", file, query.format(url=url), *private, "--url", url)
    text = result.output.replace(query.format(url=url), "")
    assert not any(part in text.lower() for part in ("ann@", "bob@", "example"))
    if "where" in query and "explain" not in query:
        assert "shape: (0," in result.stdout  # nothing to be found out by a condition
    if "read_" in query.lower():
        assert "reads files" in result.stderr


def test_without_private_columns_the_same_queries_answer(people: tuple[Path, str]) -> None:
    file, url = people
    answer = run("sdf", "sql", file, "select email, n from counts order by email", "--url", url)
    assert all(one in answer.stdout for one in PEOPLE)


def test_masked_columns_keep_types_and_public_ones_values(people: tuple[Path, str]) -> None:
    file, url = people
    private = ("--private", "email", "--private", "_key", "--json")
    query = "select * from counts order by n"
    found = json.loads(run("sdf", "sql", file, query, *private, "--url", url).stdout)
    assert [one["type"] for one in found["columns"]] == ["String", "String", "UInt32"]
    names = [one["name"] for one in found["columns"]]
    answers = [dict(zip(names, row, strict=True)) for row in found["rows"]]
    assert [row["n"] for row in answers] == [1, 2]
    assert {row["email"] for row in answers} == {"(private)"}
    digest = answers[1]["_key"]
    shell = f"select n from counts where _key = '{digest}'\n.exit\n"
    assert "shape: (0," in run("sdf", "sql", file, *private[:4], "--url", url, stdin=shell).stdout


def test_show_state_masks_rows_and_filters_see_no_value(people: tuple[Path, str]) -> None:
    file, url = people
    shown = ("sdf", "show", file, "build/counts", "--private", "build.counts.*")
    result = run(*shown, "--url", url)
    assert result.exit_code == 0, result.stderr
    assert result.stdout.count("(private)") == 4
    assert result.stdout.count("private:") == 2
    for narrowed in (("--key", PEOPLE[0]), ("--filter", "^ann")):
        assert "private" not in run(*shown, *narrowed, "--url", url).stdout
    document = json.loads(run(*shown, "--json", "--url", url).stdout)
    assert not any(one in json.dumps(document) for one in PEOPLE)
