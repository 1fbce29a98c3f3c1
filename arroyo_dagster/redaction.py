"""Removal of secrets from displayed and logged texts: by structure from URLs, by value elsewhere.

`redact_url` removes the user info and everything after the path from a displayed URL, even if it
does not parse. A library's text may repeat a secret in any encoding. So secrets are registered
where they enter (`register_secrets`), and hidden wherever such a text is repeated (`redact_text`,
`redacted_cause`). Registered secrets stay in this process: none is pickled or written.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from typing import Any
from urllib.parse import unquote

from arroyo_dagster.errors import ArroyoStateError

HIDDEN = "***"

_SCHEME = re.compile(r"(?:s3a?::|jdbc:)?[a-z][a-z0-9+.\-]*", re.IGNORECASE)
# In these schemes the text before `@` is a container or an account, unless it has a password.
_NAMED_BEFORE_AT = re.compile(r"(?:abfss?|wasbs?|r2)", re.IGNORECASE)
_AT = "@\N{FULLWIDTH COMMERCIAL AT}\N{SMALL COMMERCIAL AT}"  # urllib treats them all as `@`
_BEHIND_PATH = re.compile(r"[?#;]")
_URL_IN_TEXT = re.compile(r"(?:s3a?::|jdbc:)?\b[a-z][a-z0-9+.\-]*://[^\s\"'<>]*", re.IGNORECASE)
_NAMES = re.compile("secret|passw|token|credential|api|account|auth|access|sig|sas")
_NAMED_VALUE = re.compile(
    r"(?P<name>(?:secret|passw(?:or)?d|(?<!Invalid)(?<!Expired)token|signature(?!Does)|credential"
    r"|api[_-]?key|account[_-]?key|authorization|sharedaccesskey|\bsig\b|\bsas\b)"
    r"[\w.\-]*[\"']?\s*[=:>]\s*)"
    r"(?P<value>(?:basic|bearer)\s+[^\s\"',;)\]}]+|[^\s\"'&,;<>)\]}]+|\"[^\"]*\"|'[^']*')",
    re.IGNORECASE,
)
_SENT = re.compile(r"\b(?P<name>basic|bearer)\s+[A-Za-z0-9+/_.~\-]{8,}=*", re.IGNORECASE)

# Options with the location of a store or how to access it. All others may be secrets.
_PUBLIC_OPTIONS = frozenset(
    {
        *("client", "region", "default_region", "region_name", "account", "account_name"),
        *("profile", "skip_signature", "anon", "service_account", "application_credentials"),
        *("tenant_id", "client_id", "signature_version", "addressing_style", "mode", "format"),
        *("subscribe", "topic", "path", "project", "location"),
    }
)
# For settings and variables it is the opposite: a secret one is recognised by its name.
_SECRET_SETTING = re.compile(
    r"secret|passw|token|credential|(?:account|access|api|sas|private|service)[._-]?key|jaas"
    r"|authorization|signature|connection[._-]?string",
    re.IGNORECASE,
)
_PLACES = re.compile(r"(?:file|path|dir|host|expiration|application_credentials)$", re.IGNORECASE)
_NOT_SECRET = frozenset({"true", "false", "none", "null", "anon", "auto"})
_SHORT = 8
_MIN_OWN_CHARS = 12
_LEAST_OF_ENVIRONMENT = 4


# ---- by structure --------------------------------------------------------------------------------


def redact_url(text: str) -> str:
    """Return a URL without user info, query, fragment and parameters, even if it is invalid.

    If user info and query cannot be distinguished (`a?b@c`), only the scheme stays.
    """
    scheme, separator, rest = text.partition("://")
    if not separator or not _SCHEME.fullmatch(scheme):
        scheme, separator, rest = "", "", text
    behind = _BEHIND_PATH.search(rest)
    # A local path has no user info, even if it contains `@`.
    is_path = rest.startswith("/") and not text.startswith("//")
    at = -1 if is_path else max(rest.rfind(sign) for sign in _AT)
    if behind is not None and at > behind.start():
        return f"{scheme}{separator}{HIDDEN}"
    shown = rest if behind is None else f"{rest[: behind.start()]}?{HIDDEN}"
    if at < 0 or _is_name_before_at(scheme, rest[:at]):
        return f"{scheme}{separator}{shown}"
    return f"{scheme}{separator}{HIDDEN}@{shown[at + 1 :]}"


def _is_name_before_at(scheme: str, text: str) -> bool:
    return bool(_NAMED_BEFORE_AT.fullmatch(scheme)) and text.replace("-", "").isalnum()


def secrets_in_url(text: str) -> set[str]:
    """Return the secrets in a URL: a password or token, and the values of a query."""
    scheme, _, rest = text.partition("://")
    found: set[str] = set()
    before, at, _ = rest.rpartition("@")
    if at and not _is_name_before_at(scheme, before):
        user, colon, password = before.partition(":")
        found |= {password} if colon else set() if "/" in user else {user}
    behind = _BEHIND_PATH.search(rest)
    if behind is not None:
        query = rest[behind.start() + 1 :]
        found |= {part.partition("=")[2] or part for part in re.split("[&;]", query)}
    return found


# ---- by value ------------------------------------------------------------------------------------

_KNOWN: set[str] = set()


def register_secrets(*values: object) -> None:
    """Register secrets; of mappings the values, of lists and tuples the items, recursively."""
    for value in values:
        if isinstance(value, Mapping):
            register_secrets(*value.values())
        elif isinstance(value, list | tuple | Set):
            register_secrets(*value)
        elif isinstance(value, bytes):
            register_secrets(value.decode(errors="replace"))
        elif isinstance(value, str):
            _KNOWN.update(filter(_may_be_secret, (value, unquote(value))))


def register_url(text: str) -> None:
    """Register the secrets in a URL."""
    register_secrets(secrets_in_url(text))


def register_options(options: Mapping[str, Any]) -> None:
    """Register the values of options, except those for the location and access of a store.

    Args:
        options: of any client, possibly nested; of a URL only its secrets are registered.
    """
    for name, value in options.items():
        if isinstance(value, Mapping):
            register_options(value)
        elif isinstance(value, str) and "://" in value:
            register_url(value)
        elif name.lower() not in _PUBLIC_OPTIONS:
            register_secrets(value, _members(value))


def register_settings(settings: Mapping[str, Any]) -> None:
    """Register the values of settings with names of secrets, and the secrets in other URLs."""
    for name, value in settings.items():
        register_secrets(_secrets_of_setting(name, str(value)))


@functools.lru_cache(maxsize=1024)
def _secrets_of_setting(name: str, value: str) -> Set[str]:
    if "://" in value:
        return frozenset(secrets_in_url(value))
    if not _SECRET_SETTING.search(name) or _PLACES.search(name):
        return frozenset()
    # Some contain settings, such as `password="…";` in Kafka's JAAS configuration.
    inner = (found["value"].strip("\"'") for found in _NAMED_VALUE.finditer(value))
    return frozenset((value, *inner))


def holds_secret(name: str, value: str) -> bool:
    """Return whether a setting is named like a secret, or contains one in a URL or a text."""
    return bool(_secrets_of_setting(name, value) or _NAMED_VALUE.search(value))


def _members(value: object) -> object:
    """Return the members of a key that is a JSON document, such as Google's."""
    try:
        return json.loads(value) if isinstance(value, str) and value.startswith("{") else None
    except (ValueError, RecursionError):
        return None


def _may_be_secret(value: str) -> bool:
    return value.lower() not in _NOT_SECRET and not _LOOSE_RUN.fullmatch(value)


def _of_environment() -> set[str]:
    found: set[str] = set()
    for name, value in os.environ.items():
        found |= _secrets_of_setting(name, value)
    return {
        value for value in found if len(value) >= _LEAST_OF_ENVIRONMENT and _may_be_secret(value)
    }


def redact_text(text: str) -> str:
    """Return a library's or server's text without the secrets it may repeat."""
    text = _without_known(text, least=1)
    if "://" in text:
        text = _URL_IN_TEXT.sub(lambda found: redact_url(found[0]), text)
    if _NAMES.search(text.lower()):
        text = _NAMED_VALUE.sub(lambda found: f"{found['name']}{HIDDEN}", text)
    return _SENT.sub(lambda found: f"{found['name']} {HIDDEN}", text)


def without_secrets(text: str) -> str:
    """Return this package's own text without registered secrets, for the last step before display.

    Short secrets are kept: they may also be names of jobs, which must be displayed."""
    return _without_known(text, least=_MIN_OWN_CHARS)


def _without_known(text: str, *, least: int) -> str:
    lowered = text.lower()
    known = (secret for secret in _KNOWN | _of_environment() if len(secret) >= least)
    near = (pattern for part, pattern in map(_search, known) if part in lowered)
    spans = [match.span() for pattern in near for match in pattern.finditer(text)]
    shown: list[str] = []
    done = 0
    for start, end in sorted(spans):
        if start >= done:
            shown += [text[done:start], HIDDEN]
        done = max(done, end)
    return "".join((*shown, text[done:]))


# ---- any spelling of a value ---------------------------------------------------------------------

_LOOSE_RUN = re.compile(r"[\s\x00-\x20+\\]*")
"""Characters that encoders add, omit or exchange."""
_BACKSLASH = r"(?:\\|%(?:25)*5c)"
_BLANK = rf"[\s\x00-\x20+]|{_BACKSLASH}(?:[nrtvfba0]|x[01][0-9a-f]|u00[01][0-9a-f])?"
_NAMES_OF_HTML = {"&": "amp", "<": "lt", ">": "gt", '"': "quot", "'": "apos"}


@functools.lru_cache(maxsize=1024)
def _search(secret: str) -> tuple[str, re.Pattern[str]]:
    """Return a part of a secret that no encoder changes, in lower case, and a pattern for it.

    The pattern matches each character as it is, as in a URL, in HTML, in JSON or in Python's
    `repr`, also if encoded twice.
    """
    pattern = "".join(map(_spellings, re.findall(rf"{_LOOSE_RUN.pattern[:-1]}+|.", secret.strip())))
    if len(secret) < _SHORT:
        # It counts only as a separate word; otherwise parts of many words would be hidden.
        pattern = rf"(?:(?<=%[0-9a-f]{{2}})|(?<![^\W_])|(?=[\W_]))(?:{pattern})"
        pattern += r"(?:(?![^\W_])|(?<=[\W_]))"
    part = max(re.findall("[a-z0-9]+", secret.lower()), key=len, default="")
    return part, re.compile(pattern, re.IGNORECASE)


def _spellings(run: str) -> str:
    """Return a pattern for one character, or for a run of characters that may be omitted."""
    if run.isascii() and run.isalnum():
        return run
    coded = "|".join(_coded(letter) for letter in sorted(set(run)))
    if _LOOSE_RUN.fullmatch(run):
        return f"(?:{_BLANK}|{coded})*"
    return f"(?:{_BACKSLASH}*{re.escape(run)}|{coded})"


def _coded(letter: str) -> str:
    """Return a pattern for a character as URLs, HTML, JSON and Python's `repr` encode it."""
    code = ord(letter)
    data = letter.encode(errors="surrogatepass")
    units = letter.encode("utf-16-be", errors="surrogatepass").hex()
    named = _NAMES_OF_HTML.get(letter)
    forms = [
        "".join(f"%(?:25)*{byte:02x}" for byte in data),
        "".join(rf"{_BACKSLASH}+x{byte:02x}" for byte in data),
        "".join(rf"{_BACKSLASH}+u{units[at : at + 4]}" for at in range(0, len(units), 4)),
        rf"{_BACKSLASH}+(?:x{code:02x}|U{code:08x}|u\{{0*{code:x}\}})",
        f"&(?:amp;)*(?:#0*{code}|#x0*{code:x}{f'|{named}' if named else ''});",
    ]
    return "|".join(forms)


# ---- causes --------------------------------------------------------------------------------------


@contextlib.contextmanager
def replaced(
    kinds: type[Exception] | tuple[type[Exception], ...],
    replacement: Callable[[Any], ArroyoStateError],
) -> Iterator[None]:
    """Replace errors of other libraries by errors of ours. No cause has a secret, also of an error
    of ours that was raised within.

    The collector of cycles pauses meanwhile. Otherwise a finalizer of another library may run in
    this thread, and what it logs or prints shows the error that is being handled as its context.
    """
    try:
        yield
    except ArroyoStateError as error:
        redact_causes(error)
        raise
    except kinds as error:
        enabled = gc.isenabled()
        gc.disable()
        try:
            raise replacement(error) from redacted_cause(error)
        finally:
            if enabled:
                gc.enable()
                gc.collect(0)  # here, where the replacement is the error that is being handled


class RedactedError(Exception):
    """Replaces, in a chain of causes, an error whose text contains a secret."""


def redacted_cause(error: BaseException) -> BaseException:
    """Return the cause for another error: `error`, or a copy of it without secrets.

    The copy keeps the traceback of `error`, and copies its causes likewise.
    """
    chain = list(_chain(error))
    if all(map(_is_clean, chain)):
        return error
    stand_in: BaseException | None = None
    for cause in reversed(chain):
        above = RedactedError(f"{type(cause).__name__}: {redact_text(str(cause))}")
        above.__cause__ = stand_in
        stand_in = above.with_traceback(cause.__traceback__)
    assert stand_in is not None
    return stand_in


def redact_causes(error: ArroyoStateError) -> None:
    """Remove secrets from the causes that a traceback of `error` displays."""
    for cause in _chain(error):
        if isinstance(cause, ArroyoStateError):
            below = _below(cause)
            if below is not None and not isinstance(below, ArroyoStateError):
                cause.__cause__ = redacted_cause(below)


def _chain(error: BaseException | None) -> Iterable[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = _below(error)


def _below(error: BaseException) -> BaseException | None:
    """Return the error that Python displays as the cause of `error`."""
    if error.__cause__ is not None:
        return error.__cause__
    return None if error.__suppress_context__ else error.__context__


def _is_clean(error: BaseException) -> bool:
    texts = [str(error), *map(str, getattr(error, "__notes__", ()))]
    return all(redact_text(text) == text for text in texts)
