"""Objects on S3, R2, GCS and Azure through obstore; only `obstore_*` modules import it.

obstore is the Rust `object_store` that Arroyo itself uses. Its Python client takes names unchanged,
so this module encodes and decodes them.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO, TypeVar, cast

import obstore
from obstore import exceptions, store

from arroyo_dagster.errors import InputError, NotFoundError, StorageError
from arroyo_dagster.redaction import redact_text, replaced
from arroyo_dagster.state.model.ids import StatePath
from arroyo_dagster.state.storage.concurrency import concurrently
from arroyo_dagster.state.storage.conditional_create import prove_once
from arroyo_dagster.state.storage.failures import (
    explained,
    means_no_bucket,
    no_conditional_create,
    root_missing,
    translated,
    understood,
)
from arroyo_dagster.state.storage.names import encode_path, listed_path, stored_prefix, stored_start
from arroyo_dagster.state.storage.remote.fsspec_store import FsspecStore
from arroyo_dagster.state.storage.remote.obstore_listing import (
    ListingChunk,
    chunk_of,
    chunk_of_batch,
    described,
    fetched_ahead,
)
from arroyo_dagster.state.storage.remote.obstore_options import (
    check_options,
    http_options,
    obstore_options,
    retry_options,
)
from arroyo_dagster.state.storage.remote.s3_store import S3Store
from arroyo_dagster.state.storage.remote.through_fsspec import open_through_fsspec
from arroyo_dagster.state.storage.retries import ask_again
from arroyo_dagster.state.storage.store import (
    DeleteOutcome,
    Listing,
    ObjectInfo,
    ObjectStore,
    check_range,
    check_size,
    open_by_ranges,
)
from arroyo_dagster.state.storage.urls import CheckpointUrl

F = TypeVar("F", bound=Callable[..., Any])

_KEYS_PER_DELETE = 1000
_PART_BYTES = 16 * 2**20
_CREATE_TRIES = 5
_CREATE_PAUSE_SECONDS = 0.1
_LARGEST = 2**62
_MOST_COPIED_BYTES = 5 * 2**30
"""The largest object that one S3 request copies."""
_NO_SUCH_COPY = "obstore cannot copy this object on S3"
_DEBUG = "\n\nDebug source"
_SURELY_EXISTS = re.compile(r"status code: 412|PreconditionFailed|BlobAlreadyExists")

_KINDS: Mapping[str, Callable[..., Any]] = {
    "s3": store.S3Store,
    "r2": store.S3Store,
    "gs": store.GCSStore,
    "azure": store.AzureStore,
}


class _Runtime:
    """The process that owns obstore's threads: they do not survive a fork, after which it hangs."""

    process_id: int | None = None

    @classmethod
    def lost(cls) -> bool:
        return cls.process_id not in (None, os.getpid())


def _or_through_fsspec(verb: F) -> F:
    """Call `verb` of the fsspec store in a forked child of a process that used obstore."""

    @functools.wraps(verb)
    def call(self: ObstoreStore, *args: Any, **kwargs: Any) -> Any:
        if _Runtime.lost():
            twin = self._twin_since("obstore does not work after a fork")
            return getattr(twin, verb.__name__)(*args, **kwargs)
        return verb(self, *args, **kwargs)

    return cast(F, call)


class ObstoreStore:
    """An `ObjectStore` on S3, R2, GCS or Azure through obstore.

    It is opened at its first use in each process. A pickled store contains the given options,
    including secrets; its `repr` never does. What obstore cannot do is done through fsspec:
    everything in a child that was forked after obstore was used, listings of names that obstore
    rejects (`a//b`), and finding the keys that failed in a bulk delete on S3.

    Args:
        url: of S3, R2, GCS or Azure; its region, endpoint and account take precedence over
            `options`.
        options: by the names of `options.py`, or as obstore's stores are configured.

    Raises:
        InputError: an R2 URL without an account, or an option with an invalid value.
    """

    def __init__(self, url: CheckpointUrl, options: Mapping[str, Any] | None = None) -> None:
        self.url = str(url)
        self._parsed = url
        self._options = dict(options or {})
        _, _, key = url.stored_root.partition("/")
        self._base = f"{key}/" if key else ""
        check_options(url, self._options)
        self._opened: tuple[int, Any] | None = None
        self._twin: FsspecStore | None = None
        self.probes_deleted_by: ObjectStore = self

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_opened": None}

    @property
    def through_fsspec(self) -> FsspecStore:
        """The store at the same URL through fsspec."""
        if self._twin is None:
            self._twin = open_through_fsspec(self._parsed, self._options)
            if self.probes_deleted_by is not self:
                self._twin.probes_deleted_by = self.probes_deleted_by
        return self._twin

    @_or_through_fsspec
    def read(self, path: StatePath) -> bytes:
        """Read the whole object; see `ObjectStore.read`."""
        key = self._key(path)
        with translated(self.url, path):
            response = obstore.get(self._remote(), key)
            check_size(self.url, path, response.meta["size"])  # the body has not been read yet
            return bytes(response.bytes())

    @_or_through_fsspec
    def read_range(self, path: StatePath, start: int, length: int) -> bytes:
        """Read a part of the object; see `ObjectStore.read_range`."""
        check_range(path, start, length)
        key = self._key(path)
        if not length or start > _LARGEST:
            self._size(path)
            return b""
        with translated(self.url, path):
            remote, end = self._remote(), start + min(length, _LARGEST)
            try:
                return bytes(obstore.get_range(remote, key, start=start, end=end))
            except FileNotFoundError:
                raise
            except Exception:
                # Stores refuse a range that begins beyond the end of the object.
                if start < self._size(path):
                    raise
            return b""

    @_or_through_fsspec
    def open_input(self, path: StatePath) -> BinaryIO:
        """Open the object for random access; see `ObjectStore.open_input`."""
        return open_by_ranges(self, path, self._size(path))

    @_or_through_fsspec
    def put(self, path: StatePath, data: bytes) -> None:
        """Write the object and replace an older one; see `ObjectStore.put`."""
        key = self._key(path)
        # Each part has its own timeout; a reader sees all parts or none.
        in_parts = len(data) > 2 * _PART_BYTES
        with self._writing(path):
            remote = self._remote()
            obstore.put(remote, key, bytes(data), use_multipart=in_parts, chunk_size=_PART_BYTES)

    @_or_through_fsspec
    def create(self, path: StatePath, data: bytes) -> bool:
        """Write the object unless one exists; see `ObjectStore.create`.

        Raises:
            InputError: the server ignores the condition; nothing was written.
            StorageError: not retryable if the server has no conditional create.
        """
        prove_once(self, self._options, self._create, path, self.probes_deleted_by)
        return self._create(path, data)

    def _create(self, path: StatePath, data: bytes) -> bool:
        key = self._key(path)
        with self._writing(path):
            created = ask_again(
                lambda: self._created(path, key, bytes(data)),
                tries=_CREATE_TRIES,
                pause_seconds=_CREATE_PAUSE_SECONDS,
            )
        if created is None:
            raise StorageError(
                "other requests for this object were in progress at every attempt to create it",
                url=self.url,
                path=path,
                next_step="read it to check whether one of them succeeded, then try again",
            )
        return created

    def _created(self, path: StatePath, key: str, data: bytes) -> bool | None:
        """Return whether this request created the object; None if the answer does not decide."""
        try:
            obstore.put(self._remote(), key, data, mode="create", use_multipart=False)
        except exceptions.AlreadyExistsError as error:
            # S3 also answers 409 while another request for the name is in progress, which may still
            # fail; obstore raises the same error for both.
            surely = _SURELY_EXISTS.search(str(error)) or self.head(path) is not None
            return False if surely else None
        except exceptions.BaseError as error:
            if understood(error).status == 501:
                raise no_conditional_create(self.url, path) from error
            raise
        return True

    @_or_through_fsspec
    def copy(self, source: StatePath, target: StatePath, *, create: bool = False) -> bool:
        """Copy an object within the store, on the server; see `ObjectStore.copy`.

        On S3 and R2 objects above 5 GiB, and those to be created, are copied through fsspec.
        """
        source_key, target_key = self._key(source), self._key(target)
        on_s3 = self._parsed.backend in ("s3", "r2")
        if on_s3 and create:
            return self._twin_since(_NO_SUCH_COPY).copy(source, target, create=True)
        with translated(self.url, source):
            try:
                obstore.copy(self._remote(), source_key, target_key, overwrite=not create)
            except exceptions.AlreadyExistsError:
                return False
            except FileNotFoundError:
                raise
            except exceptions.BaseError:
                if not on_s3 or self._size(source) <= _MOST_COPIED_BYTES:
                    raise
                return self._twin_since(_NO_SUCH_COPY).copy(source, target)
        return True

    @_or_through_fsspec
    def list(self, prefix: str = "", *, start_after: str | None = None) -> Iterator[ObjectInfo]:
        """Iterate over all objects below a directory; see `ObjectStore.list`.

        Differs: if the URL has no key prefix, a foreign name that begins with `/` is listed without
        the `/`.
        """
        return self._walk().objects(stored_prefix(prefix), stored_start(start_after), prefix)

    @_or_through_fsspec
    def list_dir(self, prefix: str = "") -> Listing:
        """List one level; see `ObjectStore.list_dir`."""
        below = stored_prefix(prefix)
        full, skip = self._base + below, len(self._base)
        with translated(self.url, prefix or None):
            try:
                level = obstore.list_with_delimiter(self._remote(), full.rstrip("/") or None)
            except (exceptions.InvalidPathError, ValueError) as error:
                return self._twin_since(f"{UNLISTABLE}: {error}").list_dir(prefix)
        # Some consoles mark a directory by an object with its name.
        inside = [item for item in level["objects"] if item["path"].startswith(full)]
        if not inside and not level["common_prefixes"]:
            self._walk().require_root()
        # obstore sorts directories without the slash, but `a.b/` is before `a/`.
        directories = sorted(f"{name[skip:]}/" for name in level["common_prefixes"])
        return Listing(
            objects=tuple(described(chunk_of(inside, skip))),
            prefixes=tuple(listed_path(name[:-1]) for name in directories),
        )

    @_or_through_fsspec
    def head(self, path: StatePath) -> ObjectInfo | None:
        """Describe the object; see `ObjectStore.head`."""
        key = self._key(path)
        with translated(self.url, path):
            try:
                info = obstore.head(self._remote(), key)
            except FileNotFoundError:
                return None
            return described(chunk_of([info], len(self._base)))[0]

    @_or_through_fsspec
    def delete_many(self, paths: Iterable[StatePath]) -> DeleteOutcome:
        """Delete objects, up to 1000 per request; see `ObjectStore.delete_many`."""
        keys = {path: self._key(path) for path in paths}
        failed: dict[StatePath, str] = {}
        deletes = BulkDeletes(
            remote=self._remote,
            on_s3=self._parsed.backend in ("s3", "r2"),
            head=self.head,
            through_fsspec=lambda: self.through_fsspec,
        )
        waiting = iter(keys)
        while batch := [*itertools.islice(waiting, _KEYS_PER_DELETE)]:
            failed.update(deletes.errors({path: keys[path] for path in batch}))
        return DeleteOutcome(
            deleted=tuple(path for path in keys if path not in failed),
            failed={path: failed[path] for path in keys if path in failed},
        )

    def _key(self, path: str) -> str:
        return self._base + encode_path(path)

    def _remote(self) -> Any:
        """Return obstore's store of this process."""
        opened = self._opened
        if opened is None or opened[0] != os.getpid():
            opened = self._opened = (os.getpid(), _open_remote(self._parsed, self._options))
            _Runtime.process_id = os.getpid()
        return opened[1]

    @contextlib.contextmanager
    def _writing(self, path: StatePath) -> Iterator[None]:
        """Convert errors of a write, where "not found" always means the bucket."""
        with translated(self.url, path):
            try:
                yield
            except FileNotFoundError as error:
                raise root_missing(self.url) from error

    def _size(self, path: StatePath) -> int:
        info = self.head(path)
        if info is None:
            raise NotFoundError("there is no such object", url=self.url, path=path)
        return info.size_bytes

    def _walk(self) -> ListingWalk:
        return ListingWalk(
            remote=self._remote, url=self.url, base=self._base, twin_since=self._twin_since
        )

    def keeps_versions(self) -> bool | None:
        """Whether the bucket keeps older versions; None = only S3 is asked.

        Raises:
            StorageError: it cannot be asked.
        """
        if self._parsed.backend not in ("s3", "r2"):
            return None
        twin = self._twin_since("obstore does not ask for versions")
        return cast(S3Store, twin).keeps_versions()

    def _twin_since(self, reason: str) -> FsspecStore:
        """Return the fsspec store, which is needed for the given reason."""
        try:
            twin = self.through_fsspec
            _ = twin.filesystem
        except InputError as missing:
            raise StorageError(
                f"{redact_text(reason.partition(_DEBUG)[0])}; and {missing.message}",
                retryable=False,
                url=self.url,
                next_step="install that package, or remove the option that obstore does not "
                "support",
            ) from missing
        return twin


def _open_remote(url: CheckpointUrl, options: Mapping[str, Any]) -> Any:
    settings = obstore_options(url, options)
    more = {} if settings.provider is None else {"credential_provider": settings.provider}
    refusals = (exceptions.UnknownConfigurationKeyError, TypeError, ValueError)
    with replaced(
        refusals,
        lambda error: InputError(
            f"obstore does not take these options: {redact_text(str(error))}".partition("\n")[0],
            url=str(url),
            next_step="correct or remove the option; options.py lists them",
        ),
    ):
        return _KINDS[url.backend](
            url.bucket,
            config=settings.config,
            client_options=http_options(settings.patience),
            retry_config=retry_options(settings.patience),
            **more,
        )


# ---- deletes of many objects, and which of them a failed request may have left -------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class BulkDeletes:
    """Deletes objects of one store.

    Attributes:
        remote: gives the store of obstore, of this very process.
        on_s3: whether it deletes many keys a request, as S3 and R2 do.
        head: describes an object; None if there is none.
        through_fsspec: gives the store at the same place through fsspec.
    """

    remote: Callable[[], Any]
    on_s3: bool
    head: Callable[[StatePath], ObjectInfo | None]
    through_fsspec: Callable[[], FsspecStore]

    def errors(self, keys: Mapping[StatePath, str]) -> Mapping[StatePath, str]:
        """Delete up to 1000 objects; return those that may still exist, with the reason."""
        try:
            obstore.delete(self.remote(), [*keys.values()])
            if not self._stopped_early(keys):
                return {}
        except Exception as error:
            # Find the objects that a failed delete may have left: obstore reports only one
            # failure.
            failure = understood(error)
            if self.on_s3:
                # A code without a status concerns one key; otherwise the whole request failed.
                if failure.code is None or failure.status is not None:
                    return dict.fromkeys(keys, failure.reason)
                return self.through_fsspec().delete_many(keys).failed
            if means_no_bucket(error) or (failure.retryable and len(keys) > 1):
                return dict.fromkeys(keys, failure.reason)
            problems = concurrently(self._error_of_one, keys.values())
            return {path: problem for path, problem in zip(keys, problems, strict=True) if problem}
        return self.through_fsspec().delete_many(keys).failed

    def _stopped_early(self, keys: Mapping[StatePath, str]) -> bool:
        """Return whether the last of several objects still exists after a bulk delete on S3.

        obstore counts keys that are missing in the server's answer as deleted. A server that stops
        early omits the last ones.
        """
        in_bulk = self.on_s3 and len(keys) > 1
        return in_bulk and self.head([*keys][-1]) is not None

    def _error_of_one(self, key: str) -> str | None:
        try:
            obstore.delete(self.remote(), key)
        except FileNotFoundError:
            return None
        except Exception as error:
            return explained(error)[0]
        return None


# ---- listings of all objects below a directory ---------------------------------------------------

UNLISTABLE = "there are names that obstore cannot list"
# Each chunk costs a thread switch, which CPython does every 5 ms only: so a chunk is a few pages.
_CHUNK = 5000


@dataclass(frozen=True, slots=True, kw_only=True)
class ListingWalk:
    """Lists objects of one store.

    Attributes:
        remote: gives the store of obstore, of this very process.
        base: what every name begins with: the key prefix of the root, with a slash; or nothing.
        twin_since: gives the fsspec store, for a reason.
    """

    remote: Callable[[], Any]
    url: str
    base: str
    twin_since: Callable[[str], FsspecStore]

    def objects(self, below: str, after: str, prefix: str) -> Iterator[ObjectInfo]:
        """Yield the objects below a directory, in order of their names.

        Args:
            below, after: as stored; only names that begin with the one and follow the other.
            prefix: the directory, for the fsspec store that lists what obstore cannot.
        """
        last, empty = after, True
        try:
            for batch in fetched_ahead(self._batches(below, after, _CHUNK)):
                empty = False
                chunk = chunk_of_batch(batch, len(self.base))
                yield from self._described(chunk, below, after)
                last = chunk.names[-1]
        except (exceptions.InvalidPathError, ValueError) as error:
            start = listed_path(last) if last else None
            twin = self.twin_since(f"{UNLISTABLE}: {error}")
            yield from twin.list(prefix, start_after=start)
            return
        if empty:
            self.require_root()

    def _batches(self, below: str, after: str, size: int) -> Iterator[Any]:
        try:
            batches = obstore.list(
                self.remote(),
                f"{self.base}{below}".rstrip("/") or None,
                offset=f"{self.base}{after}" if after else None,
                chunk_size=size,
                return_arrow=True,
            )
            yield from batches
        except (exceptions.InvalidPathError, ValueError):
            raise
        except Exception as error:
            with translated(self.url, below or None):
                raise error

    def _described(self, chunk: ListingChunk, below: str, after: str) -> Sequence[ObjectInfo]:
        """Describe a chunk without markers and without names before those requested (Azure)."""
        if after or chunk.names[0] <= below:
            chunk = chunk.kept(lambda name: name.startswith(below) and name > after)
        # obstore lists a directory's marker `a/` as an object `a`; only empty objects are markers.
        empty = [name for name, size in zip(chunk.names, chunk.sizes, strict=True) if not size]
        missing = concurrently(self._is_missing, empty)
        markers = frozenset(name for name, lacks in zip(empty, missing, strict=True) if lacks)
        return described(chunk, markers)

    def _is_missing(self, name: str) -> bool:
        with translated(self.url):
            try:
                obstore.head(self.remote(), self.base + name)
            except FileNotFoundError:
                return True
            return False

    def require_root(self) -> None:
        """Check that the root exists, after an empty listing.

        Raises:
            NotFoundError: it does not.
        """
        # Without a prefix, the empty listing has proved that the bucket exists.
        if not self.base:
            return
        try:
            batch = next(self._batches("", "", 1), None)
        except (exceptions.InvalidPathError, ValueError):
            return
        if batch is None:
            raise root_missing(self.url)
