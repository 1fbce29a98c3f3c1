"""Marks: objects below the checkpoint URL that forbid to maintain a prefix. Nothing writes one.

What this host must not change is a setting: `state.storage.read_only`.
"""

from __future__ import annotations

from arroyo_dagster.errors import InputError, NotFoundError
from arroyo_dagster.state.model.layout import (
    OWNERSHIP_DIRECTORY,
    JobPaths,
    mark_path,
    parse_mark_path,
)
from arroyo_dagster.state.storage.store import ObjectStore

EVERYTHING = "."
"""The prefix that holds every job below the URL."""

_MOST_LETTERS = 300


def check_job_maintained(store: ObjectStore, paths: JobPaths) -> None:
    """Refuse to maintain a job below a mark, whatever the mark contains. Costs up to three reads.

    Raises:
        InputError: there is a mark.
    """
    for prefix in _prefixes_of(paths.root):
        path = mark_path(prefix)
        try:
            text = store.read(path).decode(errors="replace")
        except NotFoundError:
            continue
        what, below = ("everything below the URL", "") if prefix == EVERYTHING else (prefix,) * 2
        raise InputError(
            f"{what} is marked by an object: it is shown and checked, and never compacted, "
            "rewritten or deleted",
            path=path,
            job=paths.root,
            mark=" ".join(text.split())[:_MOST_LETTERS],
            next_step="leave it to those who maintain it; if that is you, delete the object. To "
            "replace the mark, give read-only credentials to everybody else, or write read_only = "
            f'["{f"{store.url}/{below}".rstrip("/")}"] into the configuration file of their hosts',
        )


def marked_prefixes(store: ObjectStore) -> frozenset[str]:
    """Return the prefixes below the URL that have a mark."""
    try:
        prefixes = {parse_mark_path(info.path) for info in store.list(OWNERSHIP_DIRECTORY)}
    except NotFoundError:
        return frozenset()  # nothing was ever written below the URL
    return frozenset(prefix for prefix in prefixes if prefix is not None)


def is_marked(marks: frozenset[str], root: str) -> bool:
    """Return whether one of the prefixes holds a job, by its root."""
    return not marks.isdisjoint(_prefixes_of(root))


def _prefixes_of(root: str) -> list[str]:
    names = root.split("/")
    return [EVERYTHING, *("/".join(names[: count + 1]) for count in range(len(names)))]
