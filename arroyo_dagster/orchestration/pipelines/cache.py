"""The last good list of pipelines, in a file."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from arroyo_dagster.errors import FormatError, InputError, StorageError
from arroyo_dagster.orchestration.pipelines.model import PipelineList
from arroyo_dagster.redaction import redact_url
from arroyo_dagster.state.model.ids import checked_name
from arroyo_dagster.state.storage.local_documents import read_document

DIRECTORY = "arroyo_pipelines"
_DIGEST_LETTERS = 16


def default_path(home: str | os.PathLike[str], deployment: str | None, url: str) -> Path:
    """Return where the list of a deployment is kept below a `DAGSTER_HOME`.

    Credentials in the URL do not matter.

    Raises:
        InputError: this is no name for a deployment.
    """
    digest = hashlib.sha256(redact_url(url).encode(errors="replace")).hexdigest()
    folder = Path(home) / DIRECTORY
    if deployment is not None:
        folder /= checked_name(deployment, "deployment")
    return folder / f"{digest[:_DIGEST_LETTERS]}.json"


@dataclass(frozen=True, slots=True)
class ListCache:
    """A file with the last good list. Several processes may read and write it at once."""

    path: Path

    def read(self) -> PipelineList | None:
        """Return the list; None = there is no file.

        Raises:
            FormatError: the file holds no list that this release reads; it is kept.
            StorageError: it cannot be read.
        """
        try:
            text = read_document(self.path)
        except FileNotFoundError:
            return None
        except InputError as error:
            raise FormatError(error.message, path=str(self.path)) from error
        except OSError as error:
            raise self._failed("read", error) from error
        return PipelineList.from_json(text, str(self.path))

    def write(self, pipelines: PipelineList) -> PipelineList:
        """Replace the file by a list, as a whole, and return the list that is in force.

        Keys are given once: if another process has given keys meanwhile that this list does not
        have, the file stays, and its list is returned. A list with a problem is not written.

        Raises:
            FormatError: the file holds no list that this release reads; it is kept.
            StorageError: it cannot be written.
        """
        if pipelines.problem is not None:
            return pipelines
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self._locked():
                kept = self.read()
                if kept is not None and not kept.keys.items() <= pipelines.keys.items():
                    return kept
                self._replace(pipelines.to_json())
        except StorageError:
            raise
        except OSError as error:
            raise self._failed("written", error) from error
        return pipelines

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        handle = os.open(self.path.parent, os.O_RDONLY)
        try:
            with contextlib.suppress(OSError):  # some network file systems have no locks
                fcntl.flock(handle, fcntl.LOCK_EX)
            yield
            os.fsync(handle)
        finally:
            os.close(handle)

    def _replace(self, text: str) -> None:
        handle, staged = tempfile.mkstemp(prefix=".staged-", dir=self.path.parent)
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.replace(staged, self.path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(staged)
            raise

    def _failed(self, done: str, error: OSError) -> StorageError:
        return StorageError(
            f"the list of pipelines cannot be {done}: {error.strerror or error}",
            path=str(self.path),
            next_step="give list_cache the path of a file that this user may write",
        )
