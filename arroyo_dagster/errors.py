"""Every error of this package, as a tree: the class tells the reader what to do next.

`StateError` is another name of the root, as in Arroyo's state crate.

ArroyoStateError
├── InputError (ValueError)      fix the call
│   └── DefinitionError          fix the YAML
├── NotFoundError (LookupError)  choose another, or wait for it to be written
├── FormatError                  keep the object and report it: it is not what its format says
├── ConflictError                someone else won: read again, decide again
│   └── LeaseHeldError           another process maintains the job: wait for it, or skip the job
├── ProtocolError                facts contradict each other: stop, delete nothing
└── StorageError (OSError)       the store failed; trying again may help
"""

from __future__ import annotations

__all__ = [
    "ArroyoStateError",
    "ConflictError",
    "DefinitionError",
    "FormatError",
    "InputError",
    "LeaseHeldError",
    "NotFoundError",
    "ProtocolError",
    "StateError",
    "StorageError",
]


class ArroyoStateError(Exception):
    """The root of the tree; catch it to catch every error that this package raises on purpose.

    Args:
        message: what happened and what was expected, as one sentence without a final period.
        next_step: what the reader should do now; displayed last.
        retryable: whether the same call may succeed later without any other change.
        **facts: the objects concerned, by their names in this project (job, operator, table, epoch,
            path, url…); None values are omitted.
    """

    retryable = False

    def __init__(
        self,
        message: str,
        *,
        next_step: str | None = None,
        retryable: bool | None = None,
        **facts: object,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.next_step = next_step
        self.facts = {name: value for name, value in facts.items() if value is not None}
        if retryable is not None:
            self.retryable = retryable

    def __str__(self) -> str:
        shown = ", ".join(f"{name}={_format_fact(value)}" for name, value in self.facts.items())
        text = f"{self.message} [{shown}]" if shown else self.message
        return f"{text}. Next: {self.next_step}" if self.next_step else text

    def __reduce__(self) -> tuple[object, ...]:
        # Errors cross process boundaries (Spark workers, Dagster steps) and must keep their facts.
        return (
            _rebuilt,
            (type(self), self.message, self.next_step, self.retryable, dict(self.facts)),
        )


StateError = ArroyoStateError


def _format_fact(value: object) -> str:
    return value if isinstance(value, str) else repr(value)


def _rebuilt(
    kind: type[ArroyoStateError],
    message: str,
    next_step: str | None,
    retryable: bool,
    facts: dict[str, object],
) -> ArroyoStateError:
    return kind(message, next_step=next_step, retryable=retryable, **facts)


class InputError(ArroyoStateError, ValueError):
    """The call is invalid: fix the call."""


class DefinitionError(InputError):
    """A YAML definition is wrong: fix the file; `facts` has its path and line."""


class NotFoundError(ArroyoStateError, LookupError):
    """The named object does not exist (yet)."""


class FormatError(ArroyoStateError):
    """An object is not what its format says: keep it, report it."""


class ConflictError(ArroyoStateError):
    """Another process won a race: read again, decide again. Nothing was deleted."""


class LeaseHeldError(ConflictError):
    """Another process holds the lease on the job: wait for it, or skip the job; nothing was lost.

    `facts` has its `owner`, and where they are known its `host`, its `pid`, and `until` when the
    lease counts unless it is renewed.
    """

    retryable = True


class ProtocolError(ArroyoStateError):
    """Facts contradict each other: stop, delete nothing."""


class StorageError(ArroyoStateError, OSError):
    """The store failed to answer; the outcome of a write is then unknown."""

    retryable = True
