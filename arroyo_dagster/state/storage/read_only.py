"""Locations that this host must not change: `read_only` in the configuration file.

Here are the rules and the store that refuses; `open_store` applies them to every store.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeVar
from urllib.parse import unquote

from arroyo_dagster.errors import InputError
from arroyo_dagster.redaction import redact_url
from arroyo_dagster.state.model.ids import StatePath
from arroyo_dagster.state.storage.store import DeleteOutcome, ObjectStore
from arroyo_dagster.state.storage.urls import CheckpointUrl, parse_url
from arroyo_dagster.state.storage.wrappers import MUTATING, Wrapper

T = TypeVar("T")

LOCAL_FILE = "arroyo-state.toml"
READ_ONLY = "read-only"
"""The key of the configuration file; `read_only` is equal."""

_HOST = re.compile(r"\A(?:file:|[a-z0-9]+(?:::https?)?://[^/]*)", re.IGNORECASE)
"""What of a URL is the same in capitals: the scheme, the host and the bucket."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadOnlyPrefix:
    """A location below which nothing is changed.

    Attributes:
        prefix: a checkpoint URL, or a URL below one, as in the configuration file.
        file: the configuration file.
    """

    prefix: str
    file: str

    def below(self, url: CheckpointUrl) -> Iterator[str]:
        """Yield which directories of the store at `url` the prefix protects; "" is all of them.

        Whatever may be one location counts as one: other forms of a URL, and percent encodings.
        """
        protected = self.parsed()
        if not _may_be_one_bucket(protected, url):
            return
        for prefix in _spellings(protected):
            for root in _spellings(url):
                if root[: len(prefix)] == prefix:
                    yield ""
                elif prefix[: len(root)] == root:
                    yield "/".join(prefix[len(root) :])

    def parsed(self) -> CheckpointUrl:
        """Return the location.

        Raises:
            InputError: it is no checkpoint URL; the message names the configuration file.
        """
        text = _HOST.sub(lambda match: match[0].lower(), self.prefix.strip()).rstrip("/")
        try:
            url = parse_url(text)
            if ".." not in _segments(url.key_prefix):
                return url
            problem = "a prefix must not contain '..'"
        except InputError as error:
            problem = error.message
        raise InputError(
            f"a prefix of `read_only` cannot be used: {problem}",
            url=redact_url(self.prefix),
            file=self.file,
            next_step="write it as a checkpoint URL, for example s3://bucket/arroyo/payments, or "
            "as an absolute path",
        )


class ReadOnly(Wrapper):
    """A store that refuses to change objects below prefixes of the configuration file.

    Args:
        prefixes: each with the directory of this store that it protects, "" for all.

    Raises:
        InputError: on put, create, copy and delete_many; nothing was changed.
    """

    def __init__(self, store: ObjectStore, prefixes: Sequence[tuple[ReadOnlyPrefix, str]]) -> None:
        super().__init__(store)
        self._prefixes = tuple(prefixes)

    def open_input(self, path: StatePath) -> BinaryIO:
        """Open the object for random access, as the wrapped store does."""
        return self.inner.open_input(path)

    def delete_many(self, paths: Iterable[StatePath]) -> DeleteOutcome:
        """Delete objects, none of which is protected; see `ObjectStore.delete_many`."""
        doomed = tuple(paths)
        for path in doomed:
            self._check("delete_many", path)
        return self.inner.delete_many(doomed)

    def _call(self, verb: str, path: str, action: Callable[[], T], data: bytes = b"") -> T:
        if verb in MUTATING:
            self._check(verb, path)
        return action()

    def _check(self, verb: str, path: str) -> None:
        protected = _first_above(self._prefixes, path)
        if protected is not None:
            raise InputError(
                f"{protected.prefix} is read-only by {protected.file}: {verb} was refused, and "
                "nothing is compacted, rewritten or deleted below it",
                url=self.url,
                path=path,
                next_step="leave it to those who maintain it; if that is you, remove the prefix "
                f"from `read_only` in {protected.file}",
            )


def config_files() -> list[Path]:
    """Return the configuration files that exist: of the working directory, then of the user."""
    home = os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")
    paths = (Path(LOCAL_FILE), Path(home) / "arroyo_dagster" / "config.toml")
    # A home that this user may not enter holds no file of this user.
    return [path for path in paths if os.path.isfile(path)]


def read_toml(path: Path) -> dict[str, Any]:
    """Read a configuration file. Raises InputError: it is not a TOML file."""
    import tomllib

    from arroyo_dagster.state.storage.local_documents import read_document

    try:
        return tomllib.loads(read_document(path).decode())
    except InputError:
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"not a TOML file ({error})", path=str(path)) from error


def read_only_prefixes() -> tuple[ReadOnlyPrefix, ...]:
    """Return the prefixes of all configuration files: no file lifts those of another.

    Raises:
        InputError: a file cannot be read, or contains something else under this key.
    """
    prefixes = []
    for path in config_files():
        file = os.path.abspath(path)
        texts = _texts(read_toml(path), file)
        prefixes += [ReadOnlyPrefix(prefix=text, file=file) for text in texts]
    for prefix in prefixes:
        prefix.parsed()
    return tuple(prefixes)


def _texts(config: Mapping[str, Any], file: str, *, nested: bool = False) -> list[str]:
    """Return the texts of the key; in a section it would protect nothing, and is refused."""
    texts: list[str] = []
    for key, value in config.items():
        if isinstance(value, dict):
            _texts(value, file, nested=True)
        elif key.replace("_", "-") == READ_ONLY:
            if nested or not isinstance(value, list) or not all(isinstance(v, str) for v in value):
                raise InputError(
                    "`read_only` is a list of checkpoint URLs, above all sections",
                    file=file,
                    next_step='write for example read_only = ["s3://bucket/arroyo/payments"] at '
                    "the top of the file",
                )
            texts += value
    return texts


def guarded(
    store: ObjectStore, url: CheckpointUrl, prefixes: Iterable[ReadOnlyPrefix]
) -> ObjectStore:
    """Return the store at `url`, refusing changes below those prefixes that concern it."""
    guards = [(prefix, below) for prefix in prefixes for below in prefix.below(url)]
    return ReadOnly(store, guards) if guards else store


def read_only_check(url: str) -> Callable[[str], bool]:
    """Return whether the configuration files protect a path below `url`, as a function of the path.

    Raises:
        InputError: as `read_only_prefixes`.
    """
    parsed = parse_url(url)
    guards = [(prefix, below) for prefix in read_only_prefixes() for below in prefix.below(parsed)]
    return lambda path: _first_above(guards, path) is not None


def _first_above(
    prefixes: Iterable[tuple[ReadOnlyPrefix, str]], path: str
) -> ReadOnlyPrefix | None:
    segments = _segments(path)
    for prefix, below in prefixes:
        names = below.split("/") if below else []
        if segments[: len(names)] == names:
            return prefix
    return None


_SAME_BACKEND = {"r2": "s3"}
"""A bucket of R2 can be opened as one of S3, by an endpoint in the options or the environment."""


def _may_be_one_bucket(one: CheckpointUrl, other: CheckpointUrl) -> bool:
    """Return whether two URLs may be of one bucket. What a URL leaves out may be anything."""
    backends = {_SAME_BACKEND.get(url.backend, url.backend) for url in (one, other)}
    pairs = (
        ((one.endpoint or "").partition("://")[2], (other.endpoint or "").partition("://")[2]),
        (one.account or "", other.account or ""),
    )
    same = all(not mine or not theirs or mine.lower() == theirs.lower() for mine, theirs in pairs)
    return len(backends) == 1 and one.bucket.lower() == other.bucket.lower() and same


def _spellings(url: CheckpointUrl) -> list[list[str]]:
    """Return the segments of a key prefix; on local disk also those behind symbolic links."""
    texts = [url.key_prefix]
    if url.backend == "file":
        texts.append(os.path.realpath(url.directory))
    return [_segments(text) for text in dict.fromkeys(texts)]


def _segments(path: str) -> list[str]:
    """Return the names in a path, decoded, so that all encodings of a name are equal."""
    while "%" in path and (decoded := unquote(path)) != path:
        path = decoded
    return [name for name in path.split("/") if name not in ("", ".")]
