"""Several names of one object, on file systems that ignore case, Unicode form or trailing dots.

Folding is coarser than any such file system. Two names that fold to the same text may denote the
same object, so neither is deleted while the other is referenced. Sets of names are kept as digests.
"""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections.abc import Iterable
from urllib.parse import unquote

from arroyo_dagster.state.model.ids import StatePath

_FOLDED = re.compile(r"[a-z0-9_\-<>=/]*")
_OWN_NAMES = re.compile(
    r"table-.*-\d+(-.*)?|operator-.*-\d+\.metadata|epoch-\d+\.record|metadata|committed\.json"
    r"|(checkpoint-manifest\.pb|generation-manifest\.json|current-generation\.json)",
    re.DOTALL,
)
"""The last path segments that Arroyo and this package create, folded."""

_DIGITS = re.compile(r"\d+")


def fold(path: str) -> str:
    """Return the text that every name of one object folds to."""
    if _FOLDED.fullmatch(path):
        return path
    text = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", path).casefold())
    return "/".join(segment.rstrip(". ") for segment in text.split("/"))


def fold_numbers(path: str) -> str:
    """Fold a path as `fold` does, and write every number in ASCII digits without leading zeros."""
    return _DIGITS.sub(lambda match: str(int(match[0])), fold(path))


def second_names(foreign: Iterable[StatePath], root: StatePath) -> dict[str, StatePath]:
    """Return foreign names that may be second names of a job's objects, by their folded text.

    Args:
        root: of the job.
    """
    names: dict[str, StatePath] = {}
    for path in foreign:
        below = path.removeprefix(f"{root}/")
        for text in (below, unquote(below)):  # names that cannot be addressed are listed encoded
            folded = fold_numbers(text)
            if _OWN_NAMES.fullmatch(folded.rpartition("/")[2]):
                names.setdefault(folded, path)
    return names


class PathsDigest:
    """The digest of a set of paths, in any order; also answers whether a path is in the set.

    The only possible wrong answer is that a path is in the set, in which case it is kept.
    """

    def __init__(self, paths: Iterable[str] = ()) -> None:
        self._known: set[int] = set()
        self._sum = 0
        self.add(paths)

    def add(self, paths: Iterable[str]) -> None:
        """Add paths; paths that are already in it change nothing."""
        for path in paths:
            number = _number(path)
            if number not in self._known:
                self._known.add(number)
                self._sum += number

    def __contains__(self, path: str) -> bool:
        return _number(path) in self._known

    def __len__(self) -> int:
        return len(self._known)

    @property
    def hexdigest(self) -> str:
        return f"{self._sum % 2**128:032x}"

    @staticmethod
    def joined(digests: Iterable[str]) -> str:
        """Return the digest of a union of disjoint sets from their digests."""
        return f"{sum(int(digest, 16) for digest in digests) % 2**128:032x}"


def _number(path: str) -> int:
    data = path.encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(data, digest_size=16).digest(), "big")


class ReferencedPaths(PathsDigest):
    """The paths that are referenced; also decides whether another name may denote one of them.

    Args:
        root: of the job that contains all paths.
    """

    def __init__(self, root: StatePath) -> None:
        self._root = f"{root}/"
        self._folded = PathsDigest()
        super().__init__()

    def add(self, paths: Iterable[str]) -> None:
        """Add paths; paths that are already in it change nothing."""
        all_paths = list(paths)
        super().add(all_paths)
        for path in all_paths:
            folded = self._fold(path)
            if folded != path:
                self._folded.add([folded])

    def resembles(self, path: str) -> bool:
        """Return whether a path in it differs only by case, Unicode form or trailing dots.

        Undefined for a path that is itself in it.
        """
        folded = self._fold(path)
        return folded in self._folded or (folded != path and folded in self)

    def _fold(self, path: str) -> str:
        below = path.removeprefix(self._root)
        return path if _FOLDED.fullmatch(below) else f"{self._root}{fold(below)}"
