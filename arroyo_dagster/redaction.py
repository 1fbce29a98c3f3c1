"""Secrets leave every text that people or logs see: by structure out of URLs, by value elsewhere.

A URL that is shown loses its user info and the values behind its path, whether or not it parses
(`redact_url`). A text of a library may repeat a secret in any spelling: a secret is registered
where it enters (`register_secrets`), and hidden wherever such a text is repeated (`redact_text`,
`redacted_cause`). Values of this process only: nothing here is pickled or written.
"""

from __future__ import annotations

import functools
import html
import json
import os
import re
from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import unquote

from arroyo_dagster.errors import ArroyoStateError

HIDDEN = "***"

_SCHEME = re.compile(r"(?:s3a?::|jdbc:)?[a-z][a-z0-9+.\-]*", re.IGNORECASE)
# In these the text before `@` is a container or an account, as long as it holds no password.
_NAMED_BEFORE_AT = re.compile(r"(?:abfss?|wasbs?|r2)", re.IGNORECASE)
_AT = "@\N{FULLWIDTH COMMERCIAL AT}\N{SMALL COMMERCIAL AT}"  # urllib takes all three for one
_BEHIND_PATH = re.compile(r"[?#;]")
_URL_IN_TEXT = re.compile(r"(?:s3a?::|jdbc:)?\b[a-z][a-z0-9+.\-]*://[^\s\"'<>]*", re.IGNORECASE)
_SECRET_NAME = (
    r"(?:[\w.\-]*(?:secret|password|passwd|token|signature|credential|api[_-]?key|account[_-]?key)"
    r"[\w.\-]*|sig|sas|authorization|SharedAccessKey)"
)
_NAMED_VALUE = re.compile(
    rf"(?<![\w.\-])(?!Invalid|Expired|Missing|SignatureDoes)(?P<name>{_SECRET_NAME}[\"']?\s*[=:>]\s*)"
    r"(?P<value>(?:basic|bearer)\s+[^\s\"',;)\]}]+|[^\s\"'&,;<>)\]}]+|\"[^\"]*\"|'[^']*')",
    re.IGNORECASE,
)
_SENT = re.compile(r"\b(?P<name>basic|bearer)\s+[A-Za-z0-9+/_.~\-]{8,}=*", re.IGNORECASE)

# Options whose value says where a store is or how to ask it. Any other may be a secret.
_PLAIN_OPTIONS = frozenset(
    {
        *("client", "region", "default_region", "region_name", "account", "account_name"),
        *("profile", "skip_signature", "anon", "service_account", "application_credentials"),
        *("tenant_id", "client_id", "signature_version", "addressing_style", "mode", "format"),
        *("subscribe", "topic", "path", "project", "location"),
    }
)
# Settings and variables are the other way round: what is secret says so in its name.
_SECRET_SETTING = re.compile(
    r"secret|passw|token|credential|(?:account|access|api|sas|private|service)[._-]?key|jaas"
    r"|authorization|signature|connection[._-]?string",
    re.IGNORECASE,
)
_PLACES = re.compile(r"(?:file|path|dir|host|expiration|application_credentials)$", re.IGNORECASE)
_NOT_SECRET = frozenset({"true", "false", "none", "null", "anon", "auto"})
_SHORT = 8
_OURS_LEAST = 12
_LEAST_OF_ENVIRONMENT = 4
_ESCAPES = {"\n": "n", "\r": "r", "\t": "t", "\0": "0"}


# ---- by structure --------------------------------------------------------------------------------


def redact_url(text: str) -> str:
    """Give a URL without user info, query, fragment and parameters, even if it is none.

    Where it cannot be told what is user info and what is query (`a?b@c`), only the scheme stays.
    """
    scheme, separator, rest = text.partition("://")
    if not separator or not _SCHEME.fullmatch(scheme):
        scheme, separator, rest = "", "", text
    behind = _BEHIND_PATH.search(rest)
    # A path of this machine has no user info, however many `@` it has.
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
    """Give what a URL holds beside its place: a password or token, and the values of a query."""
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
    """Remember values that no text of a library may repeat; mappings and lists by their members."""
    for value in values:
        if isinstance(value, Mapping):
            register_secrets(*value.values())
        elif isinstance(value, list | tuple | set | frozenset):
            register_secrets(*value)
        elif isinstance(value, bytes):
            register_secrets(value.decode(errors="replace"))
        elif isinstance(value, str):
            _KNOWN.update(one for one in (value, unquote(value)) if _may_be_secret(one))


def register_url(text: str) -> None:
    """Remember what a URL holds beside its place."""
    register_secrets(secrets_in_url(text))


def register_options(options: Mapping[str, Any]) -> None:
    """Remember the values of options, but for those that say where a store is and how to ask it.

    Args:
        options: of any client, nested ones too; a URL among them loses only its secrets.
    """
    for name, value in options.items():
        if isinstance(value, Mapping):
            register_options(value)
        elif isinstance(value, str) and "://" in value:
            register_url(value)
        elif name.lower() not in _PLAIN_OPTIONS:
            register_secrets(value, _members(value))


def register_settings(settings: Mapping[str, Any]) -> None:
    """Remember the values of settings that are named like secrets, and what URLs in others hold."""
    for name, value in settings.items():
        register_secrets(_secrets_of_setting(name, str(value)))


def _secrets_of_setting(name: str, value: str) -> set[str]:
    if "://" in value:
        return secrets_in_url(value)
    if not _SECRET_SETTING.search(name) or _PLACES.search(name):
        return set()
    # Some are settings themselves, as Kafka's `password="…";` is in its JAAS configuration.
    return {value, *(found["value"].strip("\"'") for found in _NAMED_VALUE.finditer(value))}


def _members(value: object) -> object:
    """The members of a key that is a JSON document, as Google's are."""
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
    """Give a text of a library, or of a server, without any secret it may repeat."""
    text = _without_known(text, least=1)
    text = _URL_IN_TEXT.sub(lambda found: redact_url(found[0]), text)
    text = _NAMED_VALUE.sub(lambda found: f"{found['name']}{HIDDEN}", text)
    return _SENT.sub(lambda found: f"{found['name']} {HIDDEN}", text)


def without_secrets(text: str) -> str:
    """Give a text of our own without the secrets that are known, for the last step before it is
    shown. Short secrets stay: as words they may be names of jobs, which must be shown."""
    return _without_known(text, least=_OURS_LEAST)


def _without_known(text: str, *, least: int) -> str:
    known = frozenset(one for one in _KNOWN | _of_environment() if len(one) >= least)
    return _pattern(known).sub(HIDDEN, text) if known else text


@functools.lru_cache(maxsize=64)
def _pattern(secrets: frozenset[str]) -> re.Pattern[str]:
    ordered = sorted(secrets, key=lambda one: (-len(one), one))
    return re.compile("|".join(map(_spellings, ordered)), re.IGNORECASE)


def _spellings(secret: str) -> str:
    """A pattern for a secret, each character as it is or as any encoder writes it."""
    secret = secret.strip()
    body = "".join(map(_spelling, secret))
    if len(secret) >= _SHORT:
        return body
    # A short one counts as a word of its own, or every text would be full of holes.
    before = r"(?:(?<![A-Za-z0-9])|(?<=%[0-9A-Fa-f]{2}))" if secret[0].isalnum() else ""
    return before + body + ("(?![A-Za-z0-9])" if secret[-1].isalnum() else "")


@functools.lru_cache(maxsize=1024)
def _spelling(letter: str) -> str:
    if letter.isascii() and (letter.isalnum() or letter in "-_."):
        return re.escape(letter)
    encoded = letter.encode(errors="surrogatepass")
    number = ord(letter)
    forms = [
        re.escape(letter),
        "".join(f"%(?:25)*{byte:02x}" for byte in encoded),  # percent-encoded, perhaps twice
        "".join(rf"\\+x{byte:02x}" for byte in encoded),
        rf"\\+(?:x0*{number:x}|u0*{number:x}|U0*{number:x}|u\{{0*{number:x}\}})",
        "".join(rf"\\+u{unit:04x}" for unit in _utf16(letter)),  # as JSON
        rf"&\#(?:x0*{number:x}|0*{number});",
        re.escape(html.escape(letter)),
    ]
    if letter.isspace() or letter in _ESCAPES:
        forms.append(rf"[\s+]*(?:\\+{_ESCAPES.get(letter, 's')})?")  # stripped or joined by many
    if letter in "\\\"'/":
        forms.append(rf"\\+{re.escape(letter)}")
    if letter == "\\":
        forms.append(r"\\+")
    if letter == "'":
        forms.append("&apos;")
    return f"(?:{'|'.join(dict.fromkeys(reversed(forms)))})"


def _utf16(letter: str) -> list[int]:
    units = letter.encode("utf-16-be", errors="surrogatepass")
    return [int.from_bytes(units[at : at + 2]) for at in range(0, len(units), 2)]


# ---- causes --------------------------------------------------------------------------------------


class RedactedError(Exception):
    """In a chain of causes: what stood for another error, whose text held a secret."""


def redacted_cause(error: BaseException) -> BaseException:
    """Give `error` to raise another one from: itself, or a copy of its text without secrets.

    The copy keeps where it was raised, and the causes of `error` in the same way.
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
    """Take secrets out of what a traceback of `error` would show beside `error` itself."""
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
    """What Python shows of an error after it."""
    if error.__cause__ is not None:
        return error.__cause__
    return None if error.__suppress_context__ else error.__context__


def _is_clean(error: BaseException) -> bool:
    texts = [str(error), *map(str, getattr(error, "__notes__", ()))]
    return all(redact_text(text) == text for text in texts)
