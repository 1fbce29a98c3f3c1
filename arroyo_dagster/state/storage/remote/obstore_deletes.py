"""Deletes of many objects through obstore, and which of them a failed request may have left."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import obstore

from arroyo_dagster.state.model.ids import StatePath
from arroyo_dagster.state.storage.concurrency import concurrently
from arroyo_dagster.state.storage.failures import explained, means_no_bucket, understood
from arroyo_dagster.state.storage.remote.fsspec_store import FsspecStore
from arroyo_dagster.state.storage.store import ObjectInfo


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
            return self._errors_after(error, keys)
        return self.through_fsspec().delete_many(keys).failed

    def _stopped_early(self, keys: Mapping[StatePath, str]) -> bool:
        """Return whether the last of several objects still exists after a bulk delete on S3.

        obstore counts keys that are missing in the server's answer as deleted. A server that stops
        early omits the last ones.
        """
        in_bulk = self.on_s3 and len(keys) > 1
        return in_bulk and self.head([*keys][-1]) is not None

    def _errors_after(
        self, error: Exception, keys: Mapping[StatePath, str]
    ) -> Mapping[StatePath, str]:
        """Find the objects that a failed delete may have left: obstore reports only one failure."""
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

    def _error_of_one(self, key: str) -> str | None:
        try:
            obstore.delete(self.remote(), key)
        except FileNotFoundError:
            return None
        except Exception as error:
            return explained(error)[0]
        return None
