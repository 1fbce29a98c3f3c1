"""The import table of the house (`style.md`), and what may be loaded when."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from arroyo_dagster import state

PACKAGE = Path(__file__).parents[1] / "arroyo_dagster"
OURS = "arroyo_dagster"

# Room -> (rooms it may import, third parties it may import). The longest matching name counts.
CORE = {"errors", "redaction", "user_modules", "lazy", "state.model"}
LOW = CORE | {"state.planning", "state.codec", "state.storage"}
SUBTASK = {
    *("state.tables", "state.backend", "state.backend_reader", "state.operators"),
    *("state.pipeline", "state.exchange"),
    *("state.task", "state.coordinator", "state.connectors"),
    *("state.lease", "state.lease_records"),
}
STATE = LOW | SUBTASK | {"state.local", "state"}
ROOMS: dict[str, tuple[set[str], set[str]]] = {
    "": ({"*"}, set()),  # __init__: public names, each loaded when asked for
    "errors": (set(), set()),
    "lazy": (set(), set()),
    "user_modules": ({"errors"}, set()),
    "redaction": ({"errors"}, set()),  # what every message goes through
    "state": ({"*"}, set()),
    "state.model": (CORE, set()),
    "state.planning": (CORE | {"state.planning"}, set()),
    "state.codec": (CORE | {"state.codec"}, {"google", "pyarrow", "numpy"}),
    "state.storage": (CORE | {"state.storage"}, set()),
    "state.storage.fsspec_store": (CORE | {"state.storage"}, {"fsspec"}),
    "state.storage.s3_store": (CORE | {"state.storage"}, {"s3fs"}),
    "state.storage.obstore_store": (CORE | {"state.storage"}, {"obstore"}),
    "state.storage.arroyo_postgres": (CORE | {"state.storage"}, {"psycopg"}),
    "state.storage.obstore_listing": (CORE | {"state.storage"}, {"pyarrow"}),
    "state.storage.credentials": (CORE | {"state.storage"}, {"botocore"}),
    "state.storage.fsspec_options": (CORE | {"state.storage"}, {"aiobotocore", "botocore"}),
    **{room: (LOW | SUBTASK, {"pyarrow", "numpy"}) for room in SUBTASK},
    "state.sdf": (LOW | SUBTASK | {"state.sdf"}, {"pyarrow", "polars", "numpy"}),
    "state.tables.key_index": (LOW | SUBTASK, {"pyarrow", "numpy", "polars"}),
    "state.sdf.yaml_tree": (CORE | {"state.sdf"}, {"ruamel"}),
    "state.local": (STATE, {"pyarrow", "numpy", "polars"}),
    "spark": (STATE | {"spark"}, {"py4j", "pyspark", "pyarrow"}),
    "orchestration": (
        {"errors", "redaction", "lazy", "state", "spark", "orchestration"},
        {"dagster", "pendulum", "pydantic"},
    ),
    "orchestration.resources": (  # a session over Spark Connect
        {"errors", "redaction", "lazy", "state", "spark", "orchestration"},
        {"dagster", "pydantic", "pyspark"},
    ),
    "cli": ({"*"}, {"click", "rich", "pyarrow", "pendulum"}),
}
MODULES = sorted(
    path
    for path in PACKAGE.rglob("*.py")
    if not path.name.endswith("_pb2.py") and path.parent.name != "proto"
)


def _name(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _room(module: str) -> str:
    while module not in ROOMS:
        module = module.rpartition(".")[0]
    return module


def _imports(path: Path) -> Iterator[str]:
    """Everything a module imports, inside its functions too, types for the checker included."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            assert node.module is not None
            yield node.module


@pytest.mark.parametrize("path", MODULES, ids=_name)
def test_a_room_imports_what_its_row_of_the_table_allows(path: Path) -> None:
    rooms, parties = ROOMS[_room(_name(path))]
    for imported in _imports(path):
        top, _, rest = imported.partition(".")
        if top == OURS:
            allowed = "*" in rooms or any(
                rest == room or rest.startswith(f"{room}.") for room in rooms
            )
            assert allowed, f"{_name(path)} imports {imported}"
        elif top not in sys.stdlib_module_names:
            assert top in parties, f"{_name(path)} imports {imported}"


@pytest.mark.parametrize("path", MODULES, ids=_name)
def test_only_the_doors_read_the_environment(path: Path) -> None:
    # The session writes PYSPARK_PYTHON, for the workers; clients' own credentials lie there.
    doors = {
        *("cli.gc", "cli.looking", "orchestration.resources"),
        *("spark.session", "state.storage.credentials"),
        "redaction",  # the values to hide
        "orchestration.secrets",  # the values of variables that resources name
    }
    if _name(path) not in doors:
        text = path.read_text()
        assert "os.environ" not in text
        assert "getenv" not in text


@pytest.mark.parametrize(
    ("imported", "banned"),
    [
        ("arroyo_dagster", {"dagster", "pyspark", "pyarrow", "polars"}),
        ("arroyo_dagster.state", {"dagster", "pyspark"}),
        ("arroyo_dagster.cli", {"dagster", "pyspark"}),
        ("arroyo_dagster.state.coordinator", {"dagster", "pyspark", "pandas"}),
        ("arroyo_dagster.spark.pipeline", {"dagster", "pyspark"}),
        ("definitions", {"pyspark", "pyarrow", "polars", "pandas", "fsspec", "s3fs", "obstore"}),
    ],
)
def test_an_import_loads_nothing_heavy(imported: str, banned: set[str]) -> None:
    code = f"import sys, {imported}; print(*sorted({{m.partition('.')[0] for m in sys.modules}}))"
    answer = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=PACKAGE.parent
    )
    assert not banned & set(answer.stdout.split())


# ---- what people read ----------------------------------------------------------------------------

# Names that the description of Arroyo gave us: whoever knows it finds what each stands for.
OF_ARROYO = (
    *("BackingStore", "ParquetBackend", "StateBackend", "TableManager", "TaskInfo"),
    *("GlobalKeyedTable", "GlobalKeyedTableCheckpointer", "GlobalKeyedView", "MigratableState"),
    *("ExpiringTimeKeyTable", "ExpiringTimeKeyView", "KeyTimeView", "UncachedKeyValueView"),
    *("global_table_config", "global_table_config_with_version", "timestamp_table_config"),
    *("hash_key", "server_for_hash", "range_for_server", "JobPaths", "CheckpointMessage"),
)


def _members(name: str) -> Iterator[tuple[str, object]]:
    """A public name of the state package, and what is public of it."""
    found = getattr(state, name)
    yield name, found
    for member, value in vars(found).items() if inspect.isclass(found) else ():
        function = value.fget if isinstance(value, property) else value
        function = getattr(function, "__func__", function)
        if not member.startswith("_") and inspect.isfunction(function):
            yield f"{name}.{member}", function


@pytest.mark.parametrize("name", state.__all__)
def test_every_public_name_says_what_it_promises(name: str) -> None:
    found = getattr(state, name)
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


@pytest.mark.parametrize("path", MODULES, ids=_name)
def test_every_module_says_what_it_is(path: Path) -> None:
    tree = ast.parse(path.read_text())
    assert ast.get_docstring(tree) or not tree.body
