"""Conversion of store failures into the errors of `errors.py`.

Each library reports failures differently: botocore in a `response`, the clients of Azure and Google
in attributes, obstore in a text. All are first reduced to an HTTP status and the store's own code.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from arroyo_dagster.errors import ArroyoStateError, NotFoundError, StorageError
from arroyo_dagster.redaction import redact_text, replaced
from arroyo_dagster.state.model.ids import StatePath

if TYPE_CHECKING:
    from arroyo_dagster.state.storage.store import ObjectStore

DELETE_BATCH = 1000
"""How many objects one request deletes."""

_LASTING = {
    errno.EROFS: "the file system is mounted read-only",
    errno.ENOSPC: "no space is left on the device",
    errno.EDQUOT: "the disk quota is used up",
    errno.EFBIG: "a file of this size is not allowed",
    errno.ENAMETOOLONG: "the file system does not take so long a name",
    errno.ENOTDIR: "a part of this path is a file, so it cannot be a directory",
    errno.EISDIR: "there is a directory at this path, so it cannot be an object",
    errno.ENOTEMPTY: "there is a directory at this path, so it cannot be an object",
    errno.ELOOP: "too many symbolic links",
    errno.EINVAL: "the store refused the request as wrong",
    errno.ENOSYS: "the store does not know this operation",
}
_LASTING_STEPS = {
    errno.EROFS: "mount it writable, or give the URL of a store that is",
    errno.ENOSPC: "free some space, then run it again",
    errno.EDQUOT: "free some space or raise the quota, then run it again",
    errno.EFBIG: "raise the limit (`ulimit -f`, or of the file system), then run it again",
}
_AGAIN = "try again; the outcome of a write is unknown"
_SLOWER = "try again later, with fewer requests at once; the outcome of a write is unknown"
_KEYS = "give other credentials, or renew these: this store's own tools say how"
_RIGHTS = "give these credentials the right to read, list, write and delete below this URL"
_DELETE_RIGHTS = {
    "s3": "s3:DeleteObject below this URL",
    "r2": "Object Read & Write below this URL",
    "gs": "storage.objects.delete below this URL",
    "abfs": "the right to delete blobs (Storage Blob Data Contributor) below this URL",
}
"""By the scheme of a URL: the permission that deletes objects."""
_REGION = "name the bucket's region: https://s3.{region}.amazonaws.com/…, or AWS_DEFAULT_REGION"
_REACH = "check the endpoint and the network, then try again; the outcome of a write is unknown"
_OTHER_STORE = "use a store that can: S3, R2, GCS, Azure, local disk, or a newer server"

_BAD_KEYS = re.compile(
    r"InvalidAccessKeyId|SignatureDoesNotMatch|Expired|InvalidToken|AuthenticationFailed"
    r"|InvalidSecurity|NoAuthenticationInformation|InvalidAuthenticationInfo|Unauthorized"
)
_NO_KEYS = re.compile(
    r"credentials? (provider|chain)|no usable credentials|Unable to locate credentials"
    r"|/latest/api/token|/security-credentials|computeMetadata|/metadata/identity|token request",
    re.IGNORECASE,
)
_THROTTLED = re.compile(
    r"SlowDown|Throttl|TooManyRequests|RequestLimitExceeded|ServerBusy|rateLimitExceeded"
)
_BUSY = re.compile(r"RequestTimeout$|OperationAborted|ConditionalRequestConflict")
_WRONG_REGION = re.compile(r"PermanentRedirect|AuthorizationHeaderMalformed|IllegalLocation")
_NO_BUCKET = re.compile(
    r"NoSuchBucket|ContainerNotFound|[Ss]pecified (bucket|container) does not exist"
    r"|no bucket named"
)
_TIMED_OUT = re.compile(r"\bTimeout\b|TimedOut|timed out", re.IGNORECASE)
_UNREACHABLE = re.compile(r"error sending request|Connect(ion)?(Error|Refused)|could not connect")
_LASTS = re.compile(
    r"permission denied|credentials|AccessDenied|write-protected|read-only|refused the request"
    r"|in another region|does not know this operation|symbolic link"
)
_STATUS = re.compile(r"status code: (\d{3})\b")
_CODE = re.compile(r"<Code>([^<]{1,80})</Code>|\(code: ([^)]{1,80})\)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """One classified failure.

    Attributes:
        retryable: whether a retry may help without any other change.
        status, code: of the store's answer; None if there was none or it had none.
    """

    reason: str
    retryable: bool
    next_step: str | None = None
    status: int | None = None
    code: str | None = None


def translated(url: str, path: str | None = None) -> AbstractContextManager[None]:
    """Convert the errors that a store's library raises within into our errors.

    The errors name `url` and `path`. Neither they nor the causes in a traceback contain a secret.

    Raises:
        NotFoundError: there is no object at `path`, or no bucket at `url`.
        StorageError: any other failure; `retryable` unless it persists until something is changed.
    """

    def replacement(error: Exception) -> ArroyoStateError:
        if means_no_bucket(error):
            return root_missing(url)
        if isinstance(error, FileNotFoundError):
            return NotFoundError("there is no such object", url=url, path=path)
        return storage_error(error, url, path)

    return replaced(Exception, replacement)


def root_missing(url: str) -> NotFoundError:
    """Return the error for a missing root at `url`."""
    return NotFoundError(
        "the root does not exist: there is no such bucket, or nothing below this prefix",
        url=url,
        next_step="check the URL: nothing was ever written below it, or all of it was deleted",
    )


def no_conditional_create(url: str, path: str) -> StorageError:
    """Return the error for a store without conditional create."""
    return StorageError(
        "this server does not know conditional create (PUT with If-None-Match: *)",
        retryable=False,
        url=url,
        path=path,
        status=501,
        next_step="keep checkpoints that claim on S3, R2, GCS, Azure, local disk or a newer server",
    )


def storage_error(error: Exception, url: str, path: str | None = None) -> StorageError:
    """Return the StorageError for a library's error."""
    failure = understood(error)
    return StorageError(
        failure.reason,
        retryable=failure.retryable,
        url=url,
        path=path,
        status=failure.status,
        code=failure.code,
        next_step=failure.next_step,
    )


def explained(error: Exception) -> tuple[str, bool]:
    """Return the reason of a failure and whether it is retryable."""
    failure = understood(error)
    return failure.reason, failure.retryable


def delete_step(reason: str, url: str, path: StatePath) -> str:
    """Return what to do after a failed deletion: if it was denied, the permission to give.

    Args:
        reason: as the store reported it.
        path: an object that was not deleted.
    """
    rerun = "run it again: the objects that refer to them still exist"
    if not re.search(r"permission denied|AccessDenied", reason):
        return rerun
    folder = f"{url.removeprefix('file://').rstrip('/')}/{path.parent or ''}".rstrip("/")
    rights = {"file:": f"write permission on the directory {folder}", **_DELETE_RIGHTS}
    matching = (right for scheme, right in rights.items() if url.startswith(scheme))
    right = next(matching, "the right to delete objects below this URL")
    return f"give these credentials {right}, then {rerun}"


def lasts(reason: str) -> bool:
    """Return whether the reason of a failed deletion persists until something is changed."""
    return _LASTS.search(reason) is not None


def means_no_bucket(error: Exception) -> bool:
    """Return whether the store answered that there is no such bucket or container."""
    status, code = _answer(error)
    return status in (None, 404, 500) and bool(_NO_BUCKET.search(f"{code} {error}"))


def understood(error: Exception) -> Failure:
    """Classify an error: the reason, whether it is retryable, and the next step."""
    status, code = _answer(error)
    answer = " ".join(f"{status or ''} {code or ''}".split())
    text = _short(error)
    kind = type(error).__name__
    if "Credentials" in kind or (status in (None, 403) and _NO_KEYS.search(str(error))):
        return Failure(
            reason=f"no usable credentials for this store: {text}", retryable=False, next_step=_KEYS
        )
    if status is None and code is None:
        # Classify a failure without an answer of the store.
        if isinstance(error, PermissionError):
            return Failure(reason=f"permission denied: {text}", retryable=False, next_step=_RIGHTS)
        number = error.errno if isinstance(error, OSError) else None
        if number in _LASTING:
            step = _LASTING_STEPS.get(number)
            return Failure(reason=f"{_LASTING[number]}: {text}", retryable=False, next_step=step)
        whole = f"{type(error).__name__} {error}"
        if _TIMED_OUT.search(whole):
            reason = f"the store did not answer in time: {text}"
            return Failure(reason=reason, retryable=True, next_step=_AGAIN)
        if _UNREACHABLE.search(whole):
            reason = f"the store cannot be reached: {text}"
            return Failure(reason=reason, retryable=True, next_step=_REACH)
        return Failure(reason=f"the store failed: {text}", retryable=True, next_step=_AGAIN)
    failure = _answered(status or 0, code or "", f"{answer}: {text}")
    reason, retryable, step = failure
    return Failure(reason=reason, retryable=retryable, next_step=step, status=status, code=code)


def _answered(status: int, code: str, said: str) -> tuple[str, bool, str | None]:
    """Classify an answer of the store by its status and code."""
    if status == 401 or _BAD_KEYS.search(code):
        return f"the store does not accept these credentials ({said})", False, _KEYS
    if _WRONG_REGION.search(code) or status in (301, 307):
        return f"the bucket is in another region ({said})", False, _REGION
    if status == 403 or code in ("AccessDenied", "AllAccessDisabled"):
        return f"permission denied ({said})", False, _RIGHTS
    if status == 429 or _THROTTLED.search(code):
        return f"the store is throttling us ({said})", True, _SLOWER
    if status == 501 or code == "NotImplemented":
        return f"the store does not know this operation ({said})", False, _OTHER_STORE
    if status >= 500 or code in ("InternalError", "ServiceUnavailable"):
        return f"the store's server failed ({said})", True, _AGAIN
    if status in (408, 409) or _BUSY.search(code):
        return f"the store was busy with another request ({said})", True, _AGAIN
    return f"the store refused the request ({said})", False, None


def _answer(error: BaseException | None) -> tuple[int | None, str | None]:
    """Return the HTTP status and the store's code of a failure, if any library reports them."""
    while error is not None:
        answer = getattr(error, "response", None)
        if isinstance(answer, dict):
            code = answer.get("Error", {}).get("Code")
            status = answer.get("ResponseMetadata", {}).get("HTTPStatusCode")
            status = status or (int(code) if str(code).isdecimal() else None)
            return status, str(code) if code else None
        # aiohttp reports a broken body as status 400, which is no answer of the store.
        foreign = type(error).__module__.startswith("aiohttp")
        for name in () if foreign else ("status_code", "status", "code"):
            status = getattr(error, name, None)
            if isinstance(status, int) and 100 <= status < 600:
                code = getattr(error, "error_code", None)
                return status, str(code) if code else None
        numbered, coded = _STATUS.search(str(error)), _CODE.search(str(error))
        if numbered or coded:
            status = int(numbered[1]) if numbered else None
            return status, (coded[1] or coded[2]) if coded else None
        error = error.__cause__
    return None, None


def _short(error: Exception) -> str:
    # obstore repeats its message in Rust's debug format below the first empty line.
    text = str(error).partition("\n\nDebug source")[0] or type(error).__name__
    text = " ".join(redact_text(text).split())
    return text if len(text) <= 500 else f"{text[:500]}…"


def delete_all(store: ObjectStore, paths: Sequence[StatePath]) -> None:
    """Delete objects in bulk; those that no longer exist count as deleted.

    Raises:
        StorageError: some could not be deleted.
    """
    for start in range(0, len(paths), DELETE_BATCH):
        outcome = store.delete_many(paths[start : start + DELETE_BATCH])
        if outcome.failed:
            path, reason = next(iter(outcome.failed.items()))
            raise StorageError(
                f"{len(outcome.failed)} objects could not be deleted; the first: {reason}",
                path=path,
                url=store.url,
                next_step=delete_step(reason, store.url, path),
            )
