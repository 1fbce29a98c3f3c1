"""Digests of what a command does to a job: what is published and deleted, in which order, and what
a restore loads afterwards. Random names and the clock are left out of them.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import pyarrow as pa
from click.testing import CliRunner

from arroyo_dagster import cli
from arroyo_dagster.errors import ArroyoStateError
from arroyo_dagster.state import (
    Epoch,
    GlobalKeyedTable,
    JobPaths,
    MemoryStore,
    ParquetBackend,
    StatePath,
)
from arroyo_dagster.state.model.layout import OUR_DIRECTORY
from tests.formats import GlobalKeyedFiles, decode_file
from tests.internals import restored_rows

DAY = 86_400_000_000
BEGAN = 1_800_000_000_000_000
"""The time of every clock: it stands still while an operation runs. All fixtures are older."""

Objects = dict[StatePath, tuple[bytes, int]]
"""Bytes, and when they were written."""

Words = tuple[str, ...]
Result = dict[str, Any]


@dataclass
class Clock:
    """The time, as this machine and the stores have it."""

    micros: int = BEGAN

    def __call__(self) -> int:
        return self.micros

    def nanos(self) -> int:
        return self.micros * 1000


@dataclass
class Case:
    """A job and the commands that it goes through, each with `JOB` for its name.

    Attributes:
        objects: below its URL, before the first command.
        paths: of the job that is looked at.
        lost: objects that are removed first.
        source: objects below a second URL, `memory://source`.
        resume: what a word of `resume` among the commands does: the job runs on.
    """

    name: str
    objects: Objects
    paths: JobPaths
    steps: Sequence[Words]
    lost: Sequence[str] = ()
    source: Objects = field(default_factory=dict)
    resume: Callable[[MemoryStore], None] = lambda store: None


# ---- a store that tells what is done to it -------------------------------------------------------

CLOCK = Clock()


@contextlib.contextmanager
def still_time() -> Iterator[None]:
    """Every clock of this machine stands at `CLOCK`."""
    CLOCK.micros = BEGAN
    with mock.patch.object(time, "time_ns", CLOCK.nanos):
        yield


def filled(name: str, objects: Objects) -> MemoryStore:
    """The store `memory://{name}` with these objects and no others."""
    times: list[int] = []
    store = MemoryStore(name, clock=lambda: times.pop() if times else CLOCK())
    store.put(StatePath("x"), b"")  # it exists from now on
    store.delete_many([info.path for info in store.list()])
    for path, (data, modified) in objects.items():
        times.append(modified)
        store.put(path, data)
    return store


def held(store: MemoryStore) -> Objects:
    return {i.path: (store.read(i.path), i.modified_micros or 0) for i in store.list()}


@contextlib.contextmanager
def watched(changes: list[str]) -> Iterator[None]:
    """Note the path of every object that is written or deleted, in order."""

    def noted(verb: str) -> Any:
        real = getattr(MemoryStore, verb)

        def call(store: MemoryStore, first: Any, *more: Any, **options: Any) -> Any:
            given = list(first) if verb == "delete_many" else first
            paths = given if verb == "delete_many" else [more[0] if verb == "copy" else given]
            sign = "-" if verb == "delete_many" else "+"
            changes.extend(f"{sign}{path}" for path in paths)
            return real(store, given, *more, **options)

        return mock.patch.object(MemoryStore, verb, call)

    with contextlib.ExitStack() as stack:
        for verb in ("put", "create", "copy", "delete_many"):
            stack.enter_context(noted(verb))
        yield


# ---- digests -------------------------------------------------------------------------------------


def short(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:10]


_RANDOM = re.compile(r"(?<![0-9a-f])(?=[0-9]*[a-f])[0-9a-f]{8,64}(?![0-9a-f])|(?<=-)[0-9]{8,64}\b")


def digest_of(path: str, data: bytes, tokens: frozenset[str]) -> str:
    """Of the rows of a data file, and of the bytes of any other object, without random names."""
    if "/table-" in path:
        rows, _ = decode_file(data, StatePath(path))
        return f"{rows.num_rows} rows {digest_of_rows(rows)}"
    text = data
    for token in tokens:
        text = text.replace(token.encode(), b"*" * len(token))
    return short(text)


def digest_of_rows(rows: pa.Table) -> str:
    """Of the rows in any order."""
    return short("\n".join([str(rows.schema), *sorted(map(repr, as_rows(rows)))]).encode())


def as_rows(rows: pa.Table) -> list[tuple[Any, ...]]:
    columns = [
        column.cast(pa.int64()) if pa.types.is_timestamp(column.type) else column
        for column in rows.columns
    ]
    return list(zip(*(column.to_pylist() for column in columns), strict=True))


def loaded(
    store: MemoryStore, paths: JobPaths, epoch: Epoch | None = None
) -> tuple[Result, dict[str, list[Any]]]:
    """What a restore of an epoch (the newest) loads: a digest for each table, and the rows."""
    backend = ParquetBackend(store, paths)
    newest = backend.load(epoch)
    found: Result = {"epochs": ",".join(map(str, backend.epochs())), "state": newest.state.value}
    if newest.progress is not None:
        found["offsets"] = newest.progress.offsets
    rows_of = {}
    for operator in newest.operators:
        found[operator.operator] = f"{operator.parallelism} at {operator.min_watermark_micros}"
        for name, files in operator.tables.items():
            label = f"{operator.operator} {name}"
            if isinstance(files, GlobalKeyedFiles):
                pairs = GlobalKeyedTable(operator.configs[name], store).load(files.files)
                rows: list[Any] = sorted(pairs.items())
            else:
                managed = newest.progress is not None
                rows = as_rows(restored_rows(store, operator, name, managed=managed).rows)
            rows_of[label] = sorted(map(repr, rows))
            found[label] = f"{len(rows)} rows {short(chr(10).join(rows_of[label]).encode())}"
    return found, rows_of


_CLASSES = (
    (rf"/{OUR_DIRECTORY}/(leases|writers|windows)/", ""),
    (rf"/{OUR_DIRECTORY}/([^/]+)", r"own \1"),
    (r"/operator-[^/]+/metadata$", "operator metadata"),
    (r"/operator-[^/]+/table-", "data"),
    (r"/epochs/", "epoch record"),
    (r"/generations/\d+/([^/]+)$", r"\1"),
    (r"/checkpoint-\d+/([^/]+)$", r"\1"),
)


def order_of(changes: Iterable[str], before: Objects) -> str:
    """The kinds of the objects that are written and deleted, in order, without repetition; of
    metadata that is overwritten, the objects."""
    kinds = []
    for change in changes:
        if change[0] == "+" and change[1:] in before and f"/{OUR_DIRECTORY}/" not in change:
            kinds.append("+" + "/".join(change.split("/")[-2:]))
            continue
        for pattern, kind in _CLASSES:
            match = re.search(pattern, change)
            if match is not None:
                kinds.append(kind and change[0] + match.expand(kind))
                break
        else:
            kinds.append(change[0] + change.rpartition("/")[2])
    return " ".join(kind for kind, _ in itertools.groupby(filter(None, kinds)))


def run_step(case: Case, store: MemoryStore, words: Words) -> tuple[Result, dict[str, list[Any]]]:
    """Do what a command says, and return what came of it, and the rows that a restore loads."""
    before, changes = held(store), list[str]()
    with watched(changes):
        exit_code = _run(case, store, words)
    after = held(store)
    random_names = frozenset(name for path in {*before, *after} for name in _RANDOM.findall(path))
    written = [path for path, kept in after.items() if kept != before.get(path)]
    published: dict[str, list[str]] = {}
    for path in written:
        if f"/{OUR_DIRECTORY}/" not in path:
            digest = digest_of(path, after[path][0], random_names)
            published.setdefault(_plain(path), []).append(digest)
    result: Result = {
        "exit": exit_code,
        "order": order_of(changes, before),
        "published": {path: sorted(digests) for path, digests in sorted(published.items())},
        "records": _without_leases(path for path in written if f"/{OUR_DIRECTORY}/" in path),
        "deleted": _without_leases(before.keys() - after.keys()),
    }
    try:
        result["loads"], rows = loaded(store, case.paths)
    except ArroyoStateError as error:  # a job that cannot be loaded is a result, too
        result["loads"], rows = {"error": type(error).__name__}, {}
    return result, rows


def _plain(path: str) -> str:
    return _RANDOM.sub("*", path)


def _without_leases(paths: Iterable[str]) -> list[str]:
    return sorted(_plain(path) for path in paths if not re.search(_CLASSES[0][0], path))


def _run(case: Case, store: MemoryStore, words: Words) -> int:
    if words[0] == "later":
        CLOCK.micros += 4 * DAY
        return 0
    if words[0] == "resume":
        case.resume(store)
        return 0
    root = str(case.paths.root)
    more = [word.replace("JOB", root) for word in words]
    done = CliRunner().invoke(cli.main, [*more, "--url", store.url, "--yes"])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code


def results_of(case: Case) -> Iterator[tuple[str, Result, dict[str, list[Any]]]]:
    """Each step of a case, what came of it, and the rows that a restore loads then."""
    with still_time():
        filled("source", case.source)
        lost = {p for p in case.objects for one in case.lost if p.endswith(one)}
        store = filled("digests", {p: o for p, o in case.objects.items() if p not in lost})
        for number, words in enumerate(case.steps):
            name = " ".join(w for w in words if not w.startswith("--"))
            yield (f"{case.name}: {number} {name}", *run_step(case, store, words))
