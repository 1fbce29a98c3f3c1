"""Names that lead to one object: on file systems that ignore case, Unicode form or trailing dots.

Folding is coarser than any of them. Where two names fold to the same text they may be one object,
so that neither goes while something refers to the other.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable
from urllib.parse import unquote

from arroyo_dagster.state.model.garbage import PathsDigest
from arroyo_dagster.state.model.ids import StatePath

_FOLDED = re.compile(r"[a-z0-9_\-<>=/]*")
_OWN_NAMES = re.compile(
    r"table-.*-\d+(-.*)?|operator-.*-\d+\.metadata|epoch-\d+\.record|metadata|committed\.json"
    r"|(checkpoint-manifest\.pb|generation-manifest\.json|current-generation\.json)",
    re.DOTALL,
)
"""The last segments of our names, folded."""

_DIGITS = re.compile(r"\d+")


def fold(path: str) -> str:
    """The text that every name of one object folds to."""
    if _FOLDED.fullmatch(path):
        return path
    text = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", path).casefold())
    return "/".join(segment.rstrip(". ") for segment in text.split("/"))


def fold_numbers(path: str) -> str:
    """As `fold`, with every number written without zeros before it, in ASCII digits."""
    return _DIGITS.sub(lambda found: str(int(found[0])), fold(path))


def second_names(foreign: Iterable[StatePath], root: StatePath) -> dict[str, StatePath]:
    """Foreign names that could be second names of objects of a job, by what they fold to.

    Args:
        root: of the job.
    """
    found: dict[str, StatePath] = {}
    for path in foreign:
        below = path.removeprefix(f"{root}/")
        for text in (below, unquote(below)):  # one that cannot be addressed is shown as stored
            folded = fold_numbers(text)
            if _OWN_NAMES.fullmatch(folded.rpartition("/")[2]):
                found.setdefault(folded, path)
    return found


class ReferencedPaths(PathsDigest):
    """The paths that something refers to, and whether another name may be one of them.

    Args:
        root: of the job that all paths lie in.
    """

    def __init__(self, root: StatePath) -> None:
        self._root = f"{root}/"
        self._folded = PathsDigest()
        super().__init__()

    def add(self, paths: Iterable[str]) -> None:
        """Take in more paths; those that are in it already change nothing."""
        known = list(paths)
        super().add(known)
        for path in known:
            folded = self._fold(path)
            if folded != path:
                self._folded.add([folded])

    def resembles(self, path: str) -> bool:
        """Whether a path in it differs from this one only by case, Unicode form or trailing dots.

        Of a path that is itself in it the answer is of no use.
        """
        folded = self._fold(path)
        return folded in self._folded or (folded != path and folded in self)

    def _fold(self, path: str) -> str:
        below = path.removeprefix(self._root)
        return path if _FOLDED.fullmatch(below) else f"{self._root}{fold(below)}"
