"""Every command of `arroyo-state`, as it is run where neither Spark nor Dagster is installed.

`DRIVER` runs them in one process of that environment: a process for each would take a minute.
"""

from __future__ import annotations

from typing import NamedTuple

from arroyo_dagster.state.operations.query.metadata_tables import METADATA_TABLES


class Case(NamedTuple):
    """A command line, and what it answers.

    Attributes:
        words: the command line.
        text: what its output contains.
        code: its exit code.
        root: the folder of its checkpoint URL, or an empty text for none.
    """

    words: str
    text: str
    code: int = 0
    root: str = "managed"


SPARK = "Spark needs the package pyspark, which is not installed. Next: install it: pip install"
DELTA = "Delta needs the package deltalake, which is not installed. Next: install it: pip install"
PACKAGE = "sdf/packages/text/sdf-package.yaml"
WORDS = "sdf/words/dataflow.yaml"
BOUND = "--bindings sdf/words/bindings.yaml"

CASES = (
    Case("run hello.py:pipeline --epochs 1", "wrote 1 epoch, the newest is 1"),
    Case("run hello.py:pipeline", "the newest is 2"),
    Case("run hello.py:pipeline --spark", SPARK, 1),
    Case("stop main", "hello/main is at rest"),
    Case("jobs", "hello     protocol"),
    Case("jobs", "job_U5O5jKZxJg", root="arroyo"),
    Case("epochs main", "ready"),
    Case("show main", "counts"),
    Case("show job_U5O5jKZxJg", "ready", root="arroyo"),
    Case("rows main count counts", "2 of 2 rows at epoch 2"),
    Case("sql 'show tables'", "arroyo.jobs"),
    *(
        Case(f"sql 'select count(*) as n from {name}' --format csv", "n\n", root="arroyo")
        for name in METADATA_TABLES
        if name != "fate"  # of one path
    ),
    Case("sql 'select * from sessions'", "SessionWindow", root="arroyo"),
    Case(
        "sql @skew job_REpArXOlRQ --param 'operator=SessionWindow<4s>' --param table=s",
        "largest_key_rows",
        root="arroyo",
    ),
    Case("edit watermark job_REpArXOlRQ 2026-11-21T02:32:40Z", "SessionWindow", root="arroyo"),
    Case("diff main@1 main@2", "files not read"),
    Case("sql @offsets main", "advances"),
    Case("sql @watermarks main", "ahead_seconds"),
    Case("sql @restore main", "memory_bytes"),
    Case("sql @growth main", "forecast_bytes"),
    Case("export main count counts exported", "written"),
    Case("export main count counts exported --format delta", DELTA, 1),
    Case("get main count counts be", "1 row"),
    Case("verify main", "hello/main epoch 2 can be restored"),
    Case("verify job_U5O5jKZxJg", "can be restored", root="arroyo"),
    Case("verify main --spark", SPARK, 1),
    Case("bootstrap main history:orders", SPARK, 1),
    Case("health", "read-amplification"),
    Case("health --level 4", "not-restorable"),
    Case("doctor main", "nothing found"),
    Case("doctor", "pyspark: warning (not installed)"),
    Case("sql @leases", "expires_in_seconds"),
    Case("lease break main --yes", "nothing to break"),
    Case("pin main 1", "arroyo-state pin"),
    Case("sql @pins main", "arroyo-state pin"),
    Case("unpin main 1", "no epoch is pinned"),
    Case("rollback main 1", "goes back to epoch 1"),
    Case("compact plan", "hello/main"),
    Case("compact plan main", "nothing to merge at epoch 2"),
    Case("compact run main", "nothing to merge at epoch 2"),
    Case("compact run main --yes", "nothing to merge at epoch 2"),
    Case("compact run main --spark", SPARK, 1),
    Case("compact run job_U5O5jKZxJg --assume job_U5O5jKZxJg=stopped", "--yes", root="arroyo"),
    Case("compact window main --now --arroyo-api http://127.0.0.1:9", "is a managed job", 1),
    Case(
        "compact window job_U5O5jKZxJg --between 02:00-03:00 --arroyo-api http://127.0.0.1:9",
        "the job was not touched",
        root="arroyo",
    ),
    Case("compact window main --now --arroyo-api http://127.0.0.1:9 --spark", SPARK, 1),
    Case("edit offsets main all=0", "add --yes to execute"),
    Case(
        "edit offsets job_U5O5jKZxJg all=+1 --assume job_U5O5jKZxJg=stopped",
        "add --yes to execute",
        root="arroyo",
    ),
    Case("edit watermark job_U5O5jKZxJg 2026-01-01", "not a time", 1, root="arroyo"),
    Case("edit set main count counts '\"be\"' 7", "changes 1 table at epoch 2, as epoch 3"),
    Case("edit delete-key main be", "1 of 3 stored rows are removed"),
    Case("edit retain main 2026-01-01T00:00:00Z", "nothing to change at epoch 2"),
    Case("edit rescale job_U5O5jKZxJg 3", "3 subtasks load what", root="arroyo"),
    Case("find-key job_U5O5jKZxJg 0", "epochs were searched", root="arroyo"),
    Case("undo main", "there is nothing to undo"),
    Case("copy main copied-state", "epochs 1-2"),
    Case("rebuild job_U5O5jKZxJg", "no metadata of the epoch is missing", 1, root="arroyo"),
    Case("evolve job_U5O5jKZxJg job_U5O5jKZxJg", "would be forked into itself", 1, root="arroyo"),
    Case("fork job_U5O5jKZxJg job_U5O5jKZxJg", "would be forked into itself", 1, root="arroyo"),
    Case("gc plan expire main --keep 2", "nothing to delete"),
    Case("gc plan orphans main", "nothing to delete"),
    Case("gc plan dead-job main --assume main=gone", "within the grace period", 1),
    Case("gc run orphans main --yes", "hello/main"),
    Case("gc run orphans main --spark", SPARK, 1),
    Case("sql @journal main", "outcome"),
    Case("gc explain hello/main/", "stays"),
    Case("sql @fate --param path=hello/main/generations/9", "never_listed"),
    Case("gc purge main", "0 quarantines would be deleted"),
    Case("gc undelete main", "quarantine"),
    Case("completion bash", "_arroyo_state_completion", root=""),
    Case(f"sdf check {WORDS}", "no errors, 0 warnings", root=""),
    Case(f"sdf show {WORDS} --dot", "digraph", root=""),
    Case("sdf generate dataflow new-words", "written: new-words/dataflow.yaml", root=""),
    Case("sdf test new-words/dataflow.yaml", "1 passed, 0 failed", root=""),
    Case("sdf schema dataflow", "json-schema.org", root=""),
    Case(f"sdf show {PACKAGE}", "function sentence-words", root=""),
    Case(f"sdf test section {PACKAGE}", "5 passed, 0 failed", root=""),
    Case(f"sdf test function sentence-words -f {PACKAGE} -v rain", "rain", root=""),
    Case(f"sdf test {PACKAGE}", "5 passed, 0 failed", root=""),
    Case(f"sdf run {WORDS} {BOUND}", "look-up: epoch 1", root="words"),
    Case(f"sdf run {WORDS} {BOUND} --spark", SPARK, 1, root="words"),
    Case(f"sdf replay {WORDS} {BOUND}", "count-words: 0 dead letters to replay", root="words"),
    Case(f"sdf log {WORDS}", "no record has failed", root="words"),
    Case(f"sdf clean {WORDS} --state count-words/hits", "Nothing was changed", root="words"),
    Case(f"sdf show {WORDS}", "count-words/hits/state", root="words"),
    Case(f"sdf sql {WORDS} 'select count(*) from word_stats'", "22", root="words"),
)

DRIVER = """
import importlib.util, json, shlex, sys
import click
from click.testing import CliRunner
import arroyo_dagster
from arroyo_dagster.cli import main
from arroyo_dagster.cli.lazy import LazyGroup

missing = [name for name in ("dagster", "pydantic", "pyspark", "py4j", "pandas")
           if importlib.util.find_spec(name) is None]

def leaves(group, path=()):
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if isinstance(command, LazyGroup) and command.list_commands(context):
            yield from leaves(command, (*path, name))
            if not command.invoke_without_command:
                continue
        yield (*path, name)

def run(words, root):
    env = {"ARROYO__CHECKPOINT_URL": root or None, "COLUMNS": "400"}
    found = CliRunner().invoke(main, words, env=env)
    return {"code": found.exit_code, "text": found.output, "error": repr(found.exception)}

try:
    arroyo_dagster.build_arroyo_definitions
except arroyo_dagster.InputError as error:
    component = str(error)
commands = [list(one) for one in leaves(main)]
answers = [run(shlex.split(words), root) for words, root in json.loads(sys.argv[1])]
helps = [run([*words, "--help"], "") for words in [[], *commands]]
print(json.dumps({"file": arroyo_dagster.__file__, "missing": missing, "component": component,
                  "commands": commands, "answers": answers, "helps": helps}))
"""
