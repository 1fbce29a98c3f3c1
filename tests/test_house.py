"""The import table of CONTRIBUTING, the size of folders, import cycles, what is loaded when, and
where names of objects are built."""

from __future__ import annotations

import ast
import collections
import functools
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

import arroyo_dagster
from arroyo_dagster import cli, engine, state
from tests.commands import leaf_commands
from tests.compat.arroyo import unpack

PACKAGE = Path(__file__).parents[1] / "arroyo_dagster"
OURS = "arroyo_dagster"
MOST_MODULES = 25
MOST_PARAMETERS = 7
MOST_LINES_OF_A_CLASS = 300
MOST_COMMANDS, MOST_OPTIONS = 50, 325
MOST_LINES = {
    "": 1_041,
    "cli": 9_808,
    "dataflow": 20_633,
    "engine": 4_929,
    "orchestration": 9_915,
    "sdf": 41,
    "sdf_testing": 139,
    "spark": 7_232,
    "state.codec": 7_655,
    "state.errors": 5,
    "state.metadata": 3_230,
    "state.model": 6_170,
    "state.operations": 29_810,
    "state.planning": 11_520,
    "state.storage": 6_047,
    "state.tables": 8_099,
}
"""By package; of `state` by the one below it; "" = the modules at the top."""

MOST_LINES_OF_TESTS = 89_671
"""All of tests/. The bound of the repository is 76,000."""

MANY_PARAMETERS = {
    "orchestration.definitions.build_arroyo_definitions": "each is a documented keyword",
    "orchestration.pipelines.listing.list_pipelines": "each is a documented keyword",
    "state.operations.verify.job.verify_job": "each is a documented keyword",
    "state.tables.expiring_time_key.timestamp_table_config": "the five of Arroyo, and keywords",
}
"""Functions with more than `MOST_PARAMETERS`, and why. Commands of click have what they offer."""

# Floor -> (floors it may import, third parties it may import). The longest matching name counts.
BASE = {"errors", "optional_packages", "redaction", "user_modules"}
ROWS = {"pyarrow", "numpy", "polars"}
STATE: dict[str, tuple[set[str], set[str]]] = {
    "state.model": (BASE, set()),
    "state.planning": (BASE | {"state.model"}, set()),
    "state.codec": (BASE | {"state.model"}, {"google", "pyarrow", "numpy"}),
    "state.storage": (BASE | {"state.model"}, {"tenacity"}),
    "state.storage.remote": (
        BASE | {"state.model", "state.storage"},
        {"obstore", "fsspec", "s3fs", "botocore", "aiobotocore", "pyarrow"},
    ),
    "state.storage.arroyo.postgres": (BASE | {"state.model", "state.storage"}, {"psycopg"}),
}
LOW = BASE | {"state.model", "state.planning", "state.codec", "state.storage"}
LAKE = LOW | {"state.operations.export.lake_table"}
FLOORS: dict[str, tuple[set[str], set[str]]] = {
    "": ({"*"}, set()),  # __init__: public names, each loaded when asked for
    "errors": (set(), set()),
    "optional_packages": ({"errors"}, set()),
    "user_modules": ({"errors"}, set()),
    "redaction": ({"errors"}, set()),  # what every message goes through
    "state": ({"*"}, set()),
    **STATE,
    "state.tables": (LOW, ROWS),
    "state.metadata": (LOW | {"state.tables"}, ROWS),
    "state.operations": (LOW | {"state.tables", "state.metadata"}, ROWS),
    "state.operations.export.delta_table": (LAKE, ROWS | {"deltalake"}),
    "state.operations.export.iceberg_table": (LAKE, ROWS | {"pyiceberg"}),
    "engine": (LOW | {"state.tables", "state.metadata"}, ROWS),
    "dataflow": (BASE | {"state", "engine"}, ROWS | {"ruamel"}),
    "sdf": ({"dataflow"}, set()),
    "sdf_testing": ({"dataflow"}, set()),
    "spark": (BASE | {"state"}, {"pyspark", "py4j", "pyarrow"}),
    "spark.engine": (
        BASE | {"state", "engine", "dataflow", "spark"},
        {"pyspark", "py4j", "pyarrow"},
    ),
    "orchestration": (BASE | {"state", "dataflow", "spark"}, {"dagster", "pydantic", "pendulum"}),
    "orchestration.resources": (  # a session over Spark Connect
        BASE | {"state", "dataflow", "spark", "orchestration"},
        {"dagster", "pydantic", "pyspark"},
    ),
    "cli": ({"*"}, {"click", "dagster_pipes", "rich", "pyarrow", "pendulum", "polars"}),
}
MODULES = sorted(
    path
    for path in PACKAGE.rglob("*.py")
    if not path.name.endswith("_pb2.py") and path.parent.name != "proto"
)
FOLDERS = sorted({path.parent for path in MODULES})


def _name(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _floor(module: str) -> str:
    while module not in FLOORS:
        module = module.rpartition(".")[0]
    return module


def _is_for_the_type_checker(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def _import_nodes(node: ast.AST, *, types: bool) -> Iterator[ast.Import | ast.ImportFrom]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child
        elif types or not _is_for_the_type_checker(child):
            yield from _import_nodes(child, types=types)


@functools.cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def _imports(path: Path) -> Iterator[str]:
    """Everything a module imports, inside its functions too, types for the checker included."""
    for node in _import_nodes(_tree(path), types=True):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        else:
            assert node.level == 0, f"{path}: relative import"
            assert node.module is not None
            yield node.module


def test_a_module_imports_what_its_row_of_the_table_allows() -> None:
    for path in MODULES:
        _imports_what_is_allowed(path)


def _imports_what_is_allowed(path: Path) -> None:
    floor = _floor(_name(path))
    floors, parties = FLOORS[floor]
    own = STATE.get(floor) and floor.rpartition(".")[0] != "state"
    allowed_floors = floors | ({floor} if floor and not own else set())
    for imported in _imports(path):
        top, _, rest = imported.partition(".")
        if top == OURS:
            allowed = "*" in floors or any(
                rest == one or rest.startswith(f"{one}.") for one in allowed_floors
            )
            assert allowed, f"{_name(path)} imports {imported}"
        elif top not in sys.stdlib_module_names:
            lazy = top == "lazy_loader" and path.name == "__init__.py"
            assert lazy or top in parties, f"{_name(path)} imports {imported}"


def test_work_on_state_knows_neither_the_engine_nor_dataflows() -> None:
    named = re.compile(rf"{OURS}(\.spark)?(\.| import )(engine|dataflow|sdf)\b")
    for path in (*PACKAGE.glob("state/**/*.py*"), *PACKAGE.glob("spark/**/*.py*")):
        if path.suffix in (".py", ".pyi") and PACKAGE / "spark" / "engine" not in path.parents:
            assert not named.search(path.read_text()), path


def test_planning_reads_no_clock() -> None:
    for path in MODULES:
        if _name(path).startswith("state.planning"):
            assert not {f"{OURS}.state.model.clock", "time"} & set(_imports(path)), path


@functools.cache
def _graph() -> dict[str, set[str]]:
    """Which module of ours imports which, inside its functions too."""
    names = {f"{OURS}.{_name(path)}".rstrip("."): path for path in MODULES}
    graph: dict[str, set[str]] = {name: set() for name in names}
    for name, path in names.items():
        for node in _import_nodes(_tree(path), types=False):
            if isinstance(node, ast.ImportFrom) and node.module:
                below = {f"{node.module}.{alias.name}" for alias in node.names}
                found = {one if one in names else node.module for one in below}
                graph[name] |= found & names.keys() - {name}
    return graph


def test_no_modules_import_each_other() -> None:
    graph, done = _graph(), set[str]()

    def visit(name: str, above: tuple[str, ...]) -> None:
        assert name not in above, " -> ".join((*above[above.index(name) :], name))
        if name not in done:
            for imported in sorted(graph[name]):
                visit(imported, (*above, name))
            done.add(name)

    for name in graph:
        visit(name, ())


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: path.name)
def test_no_folder_is_too_full_to_read(folder: Path) -> None:
    modules = [path for path in folder.glob("*.py") if path.name != "__init__.py"]
    assert len(modules) <= MOST_MODULES


Function = ast.FunctionDef | ast.AsyncFunctionDef


def _definitions(path: Path) -> Iterator[tuple[str, ast.ClassDef | Function]]:
    """Every class and function of a module, nested ones too, by its full name."""

    def below(node: ast.AST, name: str) -> Iterator[tuple[str, ast.ClassDef | Function]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef | Function):
                yield f"{name}.{child.name}", child
                yield from below(child, f"{name}.{child.name}")
            else:
                yield from below(child, name)

    return below(_tree(path), _name(path))


def _parameters(function: Function) -> int:
    given = function.args
    names = [one.arg for one in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
    return len(names) - (names[:1] in (["self"], ["cls"]))


def _is_command(function: Function) -> bool:
    """Whether click gives it its parameters."""
    return any(".command(" in ast.unparse(one) for one in function.decorator_list)


def test_functions_with_many_settings_take_one_value_of_options() -> None:
    found = {
        name
        for path in MODULES
        for name, node in _definitions(path)
        if isinstance(node, Function)
        and _parameters(node) > MOST_PARAMETERS
        and not _is_command(node)
    }
    assert found == set(MANY_PARAMETERS)


def test_no_class_holds_two_ideas() -> None:
    found = {
        name
        for path in MODULES
        for name, node in _definitions(path)
        if isinstance(node, ast.ClassDef)
        and (node.end_lineno or 0) - node.lineno >= MOST_LINES_OF_A_CLASS
    }
    assert not found


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: path.name)
def test_every_package_says_what_is_in_it(folder: Path) -> None:
    text = ast.get_docstring(ast.parse((folder / "__init__.py").read_text())) or ""
    first = text.partition("\n\n")[0]
    assert first[:1].isupper() or first[:1] == "`"
    assert first.endswith(".")


def test_only_few_modules_read_the_environment() -> None:
    # The session writes PYSPARK_PYTHON, for the workers; clients' own credentials lie there.
    allowed = {
        *("cli.common", "cli.directory", "cli.spark", "orchestration.resources"),
        "state.storage.read_only",  # where the configuration file of the user lies
        "cli.pipes.serving",  # the variables of a process elsewhere
        *("spark.session", "state.storage.remote.credentials"),
        "redaction",  # the values to hide
        "cli.lazy",  # it writes a setting of numpy's
        "orchestration.secrets",  # the values of variables that resources name
    }
    reading = {
        _name(path)
        for path in MODULES
        if "os.environ" in (text := path.read_text()) or "getenv" in text
    }
    assert reading <= allowed


@pytest.mark.parametrize(
    ("imported", "banned"),
    [
        ("arroyo_dagster", {"dagster", "pyspark", "pyarrow", "polars"}),
        ("arroyo_dagster.state", {"dagster", "pyspark"}),
        ("arroyo_dagster.cli", {"dagster", "pyspark"}),
        ("arroyo_dagster.engine.coordinator", {"dagster", "pyspark", "pandas"}),
        ("arroyo_dagster.spark.engine.pipeline", {"dagster", "pyspark"}),
        ("definitions", {"pyspark", "pyarrow", "polars", "pandas", "fsspec", "s3fs", "obstore"}),
    ],
)
def test_an_import_loads_nothing_heavy(imported: str, banned: set[str]) -> None:
    assert not banned & {name.partition(".")[0] for name in _loaded_by(f"import {imported}")}


def test_dagster_for_arroyo_jobs_loads_neither_the_engine_nor_dataflows(tmp_path: Path) -> None:
    url = unpack("flights", tmp_path)
    modules = _loaded_by(
        f"from {OURS} import build_arroyo_definitions",
        f"defs = build_arroyo_definitions({url!r}, mode='maintain')",
        "assert len(list(defs.resolve_all_asset_specs())) > 5",
    )
    assert not [name for name in modules if re.match(rf"{OURS}\.(engine|dataflow|sdf)", name)]


def _loaded_by(*statements: str) -> list[str]:
    """The modules that a process has loaded after it has run these statements."""
    code = "\n".join((*statements, "import sys; print(*sys.modules)"))
    answer = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=PACKAGE.parent
    )
    return answer.stdout.split()


# ---- what people read ----------------------------------------------------------------------------

# Names that the description of Arroyo gave us: whoever knows it finds what each stands for.
OF_ARROYO = (
    *("BackingStore", "ParquetBackend", "StateBackend", "TableManager", "TaskInfo"),
    *("GlobalKeyedTable", "GlobalKeyedTableCheckpointer", "GlobalKeyedView", "MigratableState"),
    *("ExpiringTimeKeyTable", "ExpiringTimeKeyView", "KeyTimeView", "UncachedKeyValueView"),
    *("global_table_config", "global_table_config_with_version", "timestamp_table_config"),
    *("hash_key", "server_for_hash", "range_for_server", "JobPaths", "CheckpointMessage"),
    *("StateMessage", "TableData"),
)


def _members(name: str) -> Iterator[tuple[str, object]]:
    """A public name of the package, and what is public of it."""
    found = getattr(arroyo_dagster, name)
    yield name, found
    for member, value in vars(found).items() if inspect.isclass(found) else ():
        function = value.fget if isinstance(value, property) else value
        function = getattr(function, "__func__", function)
        if not member.startswith("_") and inspect.isfunction(function):
            yield f"{name}.{member}", function


@pytest.mark.parametrize("name", [*state.__all__, *engine.__all__])
def test_every_public_name_says_what_it_promises(name: str) -> None:
    found = getattr(arroyo_dagster, name)
    if not inspect.isclass(found) and not inspect.isfunction(found):
        return  # a value, or another name for a type; its module speaks of it
    for member, value in _members(name):
        text = inspect.cleandoc(value.__doc__ or "")
        made_up = text.startswith(f"{name}(")  # what `dataclass` writes where nobody did
        assert text, f"{member} has no docstring"
        assert not made_up, f"{member} has no docstring"
        first = text.partition("\n\n")[0]
        assert first[0].isupper() or first[0] in "`_*", member
        assert first.rstrip().endswith((".", ":", "?")), f"{member}: {first!r} is no sentence"


@pytest.mark.parametrize("name", OF_ARROYO)
def test_names_of_arroyo_say_which_source_they_obey(name: str) -> None:
    found = getattr(state, name)
    module = sys.modules[found.__module__]
    assert "Source:" in f"{found.__doc__}{module.__doc__}"


def test_every_module_says_what_it_is() -> None:
    for path in MODULES:
        tree = _tree(path)
        assert ast.get_docstring(tree) or not tree.body, _name(path)


# ---- names of objects ----------------------------------------------------------------------------

STATE_NAME = re.compile(
    r"(checkpoint-manifest\.pb|(committed|(current-generation|generation-manifest))\.json"
    r"|(retained|index|stop-request|window|removal)\.json|_arroyo_dagster"
    r"|(^|/)(generations|epochs|checkpoints|quarantine|compactions|journal|leases|commits)/"
    r"|(^|/)(checkpoint|operator|table|epoch)-$|\.record$)"
)
NAMES_BUILT_IN = {
    "state/model/layout.py": "builds and parses every path",
    "state/model/objects.py": "parses the names in a listing",
    "state/model/ids.py": "the name of our own directory, which no job may have",
    "state/planning/gc/reachability.py": "recognizes the root of another job by parts of names",
}


def _state_names(path: Path) -> list[str]:
    """Literals that are names of objects of the state tree, or parts of them."""
    return [
        node.value
        for node in ast.walk(_tree(path))
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and not re.search(r"\s", node.value)  # messages and docstrings
        and STATE_NAME.search(node.value)
    ]


def test_only_the_layout_builds_and_parses_names_of_the_state_tree() -> None:
    for path in MODULES:
        name = str(path.relative_to(PACKAGE))
        if name not in NAMES_BUILT_IN:
            assert not _state_names(path), f"{name}: build or parse them in state/model/layout.py"


def test_each_exception_for_names_is_still_needed() -> None:
    for name in NAMES_BUILT_IN:
        assert _state_names(PACKAGE / name), name


def test_no_part_of_the_package_grows() -> None:
    """Physical lines. A number here may fall; it rises only with a page in docs/decisions."""
    lines = collections.Counter[str]()
    for path in MODULES:
        parts = _name(path).split(".")
        part = ".".join(parts[:2]) if parts[0] == "state" else parts[0]
        lines["" if part in BASE | {"", "state"} else part] += len(path.read_text().splitlines())
    assert set(lines) <= set(MOST_LINES)
    grown = {part: count for part, count in lines.items() if count > MOST_LINES[part]}
    assert not grown, f"more lines than { ({part: MOST_LINES[part] for part in grown}) }"


def test_the_tests_do_not_grow() -> None:
    """Physical lines. The number may fall; it rises only with a page in docs/decisions."""
    tests = (PACKAGE.parent / "tests").rglob("*.py")
    assert sum(len(path.read_text().splitlines()) for path in tests) <= MOST_LINES_OF_TESTS


def test_the_command_line_stays_small() -> None:
    """Commands, and options beside `--help` and those of every command."""
    shared = ("help", "url", "as_json", "wide")
    options = [
        (*words, option.name)
        for words, command in leaf_commands(cli.main)
        for option in command.params
        if isinstance(option, click.Option) and option.name not in shared
    ]
    assert len(list(leaf_commands(cli.main))) <= MOST_COMMANDS
    assert len(options) <= MOST_OPTIONS, collections.Counter(option[-1] for option in options)


# ---- what tests import ---------------------------------------------------------------------------

PUBLIC_MODULES = {
    OURS,
    *(
        f"{OURS}.{name}"
        for name in ("state", "engine", "sdf", "sdf_testing", "spark", "orchestration", "errors")
    ),
}
LEAST_SHARE_OF_PUBLIC_NAMES = 0.63
"""Of the names that tests import from the package. It may only rise; the goal is 0.6."""


def test_tests_import_public_names() -> None:
    """A test of a public name outlives a change of the inside."""
    modules = [
        module
        for path in (PACKAGE.parent / "tests").rglob("*.py")
        for node in _import_nodes(ast.parse(path.read_text()), types=True)
        for module in _modules_of_names(node)
        if module.partition(".")[0] == OURS
    ]
    share = sum(module in PUBLIC_MODULES for module in modules) / len(modules)
    assert share >= LEAST_SHARE_OF_PUBLIC_NAMES, f"{share:.3f}: import names from public modules"


def _modules_of_names(node: ast.Import | ast.ImportFrom) -> list[str]:
    """The module of each name that is imported."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [node.module or ""] * len(node.names)
