"""Removal of secrets from displayed and logged texts: by structure from URLs, by value elsewhere.

`redact_url` removes the user info and everything after the path from a displayed URL, even if it
does not parse. A library's text may repeat a secret in any encoding. So secrets are registered
where they enter (`register_secrets`), and hidden wherever such a text is repeated (`redact_text`,
`redacted_cause`). Registered secrets stay in this process: none is pickled or written.
"""

from __future__ import annotations

import functools
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
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
_NAMES = (
    "secret",
    "passw",
    "token",
    "credential",
    "api",
    "account",
    "auth",
    "access",
    "sig",
    "sas",
)
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
            _KNOWN.update(one for one in (value, unquote(value)) if _may_be_secret(one))


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
    return bool(value.strip()) and value.lower() not in _NOT_SECRET


def _of_environment() -> set[str]:
    found: set[str] = set()
    for name, value in os.environ.items():
        found |= _secrets_of_setting(name, value)
    return {one for one in found if len(one) >= _LEAST_OF_ENVIRONMENT and _may_be_secret(one)}


def redact_text(text: str) -> str:
    """Return a library's or server's text without the secrets it may repeat."""
    text = _without_known(text, least=1)
    if "://" in text:
        text = _URL_IN_TEXT.sub(lambda found: redact_url(found[0]), text)
    lowered = text.lower()
    if any(name in lowered for name in _NAMES):
        text = _NAMED_VALUE.sub(lambda found: f"{found['name']}{HIDDEN}", text)
    return _SENT.sub(lambda found: f"{found['name']} {HIDDEN}", text)


def without_secrets(text: str) -> str:
    """Return this package's own text without registered secrets, for the last step before display.

    Short secrets are kept: they may also be names of jobs, which must be displayed."""
    return _without_known(text, least=_MIN_OWN_CHARS)


def _without_known(text: str, *, least: int) -> str:
    known = [one for one in _KNOWN | _of_environment() if len(one) >= least]
    spans = _spans(text, known)
    parts: list[str] = []
    done = 0
    for start, end in sorted(spans):
        if start >= done:
            parts += [text[done:start], HIDDEN]
        done = max(done, end)
    return "".join((*parts, text[done:]))


# ---- any spelling of a value ---------------------------------------------------------------------

_CODED = re.compile(
    r"%(?P<byte>[0-9a-f]{2})"
    r"|\\+u(?P<high>d[89ab][0-9a-f]{2})\\+u(?P<low>d[c-f][0-9a-f]{2})"
    r"|(?:\\+u\{|&\#x)(?P<hex>[0-9a-f]{1,6})[};]|\\+(?-i:u)(?P<four>[0-9a-f]{4})"
    r"|\\+(?-i:U)(?P<eight>[0-9a-f]{8})|\\+x(?P<two>[0-9a-f]{2})|\\+(?P<control>[nrtvfba0])"
    r"|&\#(?P<decimal>[0-9]{1,7});|&(?P<name>amp|lt|gt|quot|apos);",
    re.IGNORECASE | re.ASCII,
)
_NAMES_OF_HTML = {"amp": "&", "lt": "<", "gt": ">", "quot": '"', "apos": "'"}
_SPACES = [one for one in map(chr, range(0x3001)) if one.isspace() or one < " "]
_LOST = re.compile(
    "|".join(re.escape(one.encode().decode("latin-1")) for one in [*_SPACES, *"+\\"])
)
"""Characters that encoders add, omit or exchange; they are ignored in comparisons."""

_ROUNDS = 3


@dataclass(frozen=True, slots=True)
class _Decoded:
    """A UTF-8 text, one character per byte, with the original start and end of each."""

    text: str
    starts: Sequence[int]
    ends: Sequence[int]

    @classmethod
    def of(cls, text: str) -> _Decoded:
        sizes = [len(letter.encode(errors="surrogatepass")) for letter in text]
        places = [at for at, size in enumerate(sizes) for _ in range(size)]
        coded = text.encode(errors="surrogatepass").decode("latin-1")
        return cls(coded, places, [at + 1 for at in places])

    def replaced(self, pattern: re.Pattern[str], by: Callable[[re.Match[str]], str]) -> _Decoded:
        parts: list[str] = []
        starts: list[int] = []
        ends: list[int] = []
        done = 0
        for found in (*pattern.finditer(self.text), None):
            stop = len(self.text) if found is None else found.start()
            parts.append(self.text[done:stop])
            starts += self.starts[done:stop]
            ends += self.ends[done:stop]
            if found is not None:
                made, done = by(found), found.end()
                parts.append(made)
                starts += [self.starts[found.start()]] * len(made)
                ends += [self.ends[done - 1]] * len(made)
        return _Decoded("".join(parts), starts, ends)


def _readings(text: str) -> list[_Decoded]:
    """Return the text and up to three rounds of decoding it, `\\xNN` as byte and as letter."""
    found = [_Decoded.of(text)]
    for as_byte in (True, False) if "\\" in text else (True,):
        last = found[0]
        for _ in range(_ROUNDS):
            more = last.replaced(_CODED, functools.partial(_meant, as_byte=as_byte))
            if more.text == last.text:
                break
            found.append(more)
            last = more
    return [one.replaced(_LOST, lambda _: "") for one in found]


def _meant(found: re.Match[str], *, as_byte: bool) -> str:
    kind = found.lastgroup
    if kind == "byte" or (kind == "two" and as_byte):
        return chr(int(found[kind], 16))
    if kind == "control":
        return " "
    if kind == "name":
        return _NAMES_OF_HTML[found["name"].lower()]
    if kind == "low":
        number = (
            0x10000 + ((int(found["high"], 16) - 0xD800) << 10) + int(found["low"], 16) - 0xDC00
        )
    else:
        number = int(found[kind or 0], 10 if kind == "decimal" else 16)
    letter = chr(min(number, sys.maxunicode))
    return letter.encode(errors="surrogatepass").decode("latin-1")


@functools.lru_cache(maxsize=1024)
def _forms(secret: str) -> tuple[frozenset[str], str]:
    """Return the forms to search for, and a part that no encoder changes, in lower case."""
    forms = frozenset(one.text.lower() for one in _readings(secret) if one.text)
    return forms, max(re.findall(r"[a-z0-9]+", secret.lower()), key=len, default="")


def _spans(text: str, secrets: Iterable[str]) -> list[tuple[int, int]]:
    """Return the spans of all `secrets` in a text, in any encoding."""
    lowered = text.lower()
    near = [one for one in secrets if _forms(one)[1] in lowered]
    readings = _readings(text) if near else []
    return [
        span
        for secret in near
        for reading in readings
        for form in _forms(secret)[0]
        for span in _found(reading, form)
        if len(secret) >= _SHORT or _is_separate_word(text, *span)
    ]


def _found(reading: _Decoded, form: str) -> Iterator[tuple[int, int]]:
    lowered = reading.text.lower()
    at = lowered.find(form) if len(lowered) == len(reading.text) else -1
    while at >= 0:
        yield reading.starts[at], reading.ends[at + len(form) - 1]
        at = lowered.find(form, at + 1)


def _is_separate_word(text: str, start: int, end: int) -> bool:
    # A short secret counts only as a separate word; otherwise parts of many words would be hidden.
    coded = re.fullmatch(r"%[0-9a-fA-F]{2}", text[max(0, start - 3) : start])
    before = bool(coded) or not text[:start][-1:].isalnum() or not text[start].isalnum()
    return before and (not text[end : end + 1].isalnum() or not text[end - 1].isalnum())


# ---- causes --------------------------------------------------------------------------------------


class RedactedError(Exception):
    """Replaces, in a chain of causes, an error whose text contains a secret."""


def redacted_cause(error: BaseException) -> BaseException:
    """Return the cause for another error: `error`, or a copy of it without secrets.

    The copy keeps the traceback of `error`, and copies its causes likewise.
    """
    chain = list(_chain(error))
    if all(_is_clean(one) for one in chain):
        return error
    stand_in: BaseException | None = None
    for one in reversed(chain):
        above = RedactedError(f"{type(one).__name__}: {redact_text(str(one))}")
        above.__cause__ = stand_in
        stand_in = above.with_traceback(one.__traceback__)
    assert stand_in is not None
    return stand_in


def redact_causes(error: ArroyoStateError) -> None:
    """Remove secrets from the causes that a traceback of `error` displays."""
    for one in _chain(error):
        if isinstance(one, ArroyoStateError):
            below = _below(one)
            if below is not None and not isinstance(below, ArroyoStateError):
                one.__cause__ = redacted_cause(below)


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
