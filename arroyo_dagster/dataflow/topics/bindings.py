"""Parse the bindings of topics from flags and from a bindings file.

    words=jsonl:words.jsonl            a file, or a directory of files; also csv, parquet
    words=jsonl:in/?follow=true        the same, and what is added later
    ticks=rate:100?limit=1000          numbers, 100 per second
    asked=stdin                        lines of the standard input
    counts=jsonl:out.jsonl             one file, or a directory if the path ends with `/`
    counts=stdout
    words=spark:kafka?subscribe=words    a source or sink of Spark, with its options

The bindings file has `sources`, `sinks`, `functions` and `env`, each by name; a binding is text as
above, or a mapping such as `{jsonl: in/, follow: true}`. Paths in it are relative to its folder.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

from arroyo_dagster.dataflow.definition.diagnostics import Diagnostics
from arroyo_dagster.dataflow.definition.yaml_tree import Node, read_tree
from arroyo_dagster.errors import InputError, NotFoundError
from arroyo_dagster.redaction import redact_url

FILE_KINDS = ("jsonl", "csv", "parquet")
_ANY = "*"
_FLAG, _COUNT = "true or false", "a whole number above 0"
SOURCE_OPTIONS: dict[str, dict[str, str]] = {
    **{kind: {"follow": _FLAG, "rows_per_epoch": _COUNT} for kind in FILE_KINDS},
    "rate": {"limit": _COUNT, "rows_per_epoch": _COUNT},
    "stdin": {"rows_per_epoch": _COUNT},
    "spark": {_ANY: "text"},
}
SINK_OPTIONS: dict[str, dict[str, str]] = {
    **{kind: {} for kind in (*FILE_KINDS, "stdout")},
    "spark": {_ANY: "text"},
}
_OPTIONS = {"source": SOURCE_OPTIONS, "sink": SINK_OPTIONS}
_WITHOUT_TARGET = ("stdin", "stdout")
_TARGETS = {"rate": ("numbers a second", "100"), "spark": ("a format of Spark", "kafka")}


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicBinding:
    """The binding of one topic.

    Attributes:
        role: source or sink.
        kind: jsonl, csv, parquet, rate, stdin, stdout or spark.
        target: the path or URL; for rate, the records per second; for spark, the format; empty for
            stdin and stdout.
        options: checked values (bool or int) by name; for spark, text that its format checks.
    """

    role: str
    topic: str
    kind: str
    target: str = ""
    options: Mapping[str, bool | int | str] = field(default_factory=dict, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class BindingsText:
    """All bindings from flags or from a bindings file.

    Attributes:
        sources, sinks: by topic.
        functions: `module:function` by the name of a step's function.
        env: the environment that user code sees as `env`.
    """

    sources: Mapping[str, TopicBinding] = field(default_factory=dict)
    sinks: Mapping[str, TopicBinding] = field(default_factory=dict)
    functions: Mapping[str, str] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict, repr=False)

    def over(self, other: BindingsText) -> BindingsText:
        """Merge with `other`; these bindings take precedence."""
        return BindingsText(
            sources={**other.sources, **self.sources},
            sinks={**other.sinks, **self.sinks},
            functions={**other.functions, **self.functions},
            env={**other.env, **self.env},
        )


def parse_binding(text: str, role: str) -> TopicBinding:
    """Read `TOPIC=KIND[:TARGET][?OPTION=VALUE&…]`.

    Raises:
        InputError: it is invalid.
    """
    topic, equals, rest = text.partition("=")
    if not (topic and equals and rest) or ":" in topic:
        raise InputError(
            f"a {role} is given as TOPIC=KIND:PATH",
            given=redact_url(text),
            next_step=f"for example `--{role} words={_example(role)}`",
        )
    return _binding(role, topic, rest)


def _binding(role: str, topic: str, text: str) -> TopicBinding:
    """Read `KIND[:TARGET][?OPTION=VALUE&…]`."""
    head, _, query = text.partition("?")
    kind, _, target = head.partition(":")
    # This is not form data: a plus sign is a plus sign, for example in a password.
    options = parse_qsl(query.replace("+", "%2B"), keep_blank_values=True)
    return checked_binding(role, topic, kind, target, dict(options))


def checked_binding(
    role: str, topic: str, kind: str, target: str, options: Mapping[str, Any]
) -> TopicBinding:
    """Check the parts of a binding, and return it.

    Raises:
        InputError: an unknown kind or option, an invalid value of an option, or a missing or
            superfluous target.
    """
    facts: dict[str, Any] = {"topic": topic, "role": role}
    kinds = _OPTIONS[role]
    if kind not in kinds:
        raise InputError(
            f"a {role} cannot be bound to {redact_url(kind)!r}; expected {', '.join(kinds)}",
            **facts,
            next_step=f"for example `--{role} {topic}={_example(role)}`",
        )
    if not target and kind not in _WITHOUT_TARGET:
        expected, example = _TARGETS.get(kind, ("a path", "PATH"))
        raise InputError(
            f"{kind} needs {expected}",
            **facts,
            next_step=f"write `{topic}={kind}:{example}`",
        )
    if target and kind in _WITHOUT_TARGET:
        raise InputError(f"{kind} takes no path", **facts, given=redact_url(target))
    if _ANY in kinds[kind]:
        texts = {name: _option_text(value) for name, value in options.items()}
        return TopicBinding(role=role, topic=topic, kind=kind, target=target, options=texts)
    unknown = options.keys() - kinds[kind].keys()
    if unknown:
        raise InputError(
            f"{kind} has no option {_format_name(min(unknown))}; a {role} of this kind has "
            f"{', '.join(kinds[kind]) or 'none'}",
            **facts,
            next_step="leave it out, or write a `?` of a path as `%3F`",
        )
    values = {name: _option(facts, name, value, kinds[kind]) for name, value in options.items()}
    return TopicBinding(role=role, topic=topic, kind=kind, target=target, options=values)


def _option_text(value: Any) -> str:
    """Return an option as text, as Spark takes it; lists and mappings (Kafka's offsets) as JSON."""
    if isinstance(value, dict | list | tuple):
        return json.dumps(value, ensure_ascii=False)
    return str(value).lower() if isinstance(value, bool) else str(value)


def _option(
    facts: Mapping[str, Any], name: str, value: Any, known: Mapping[str, str]
) -> bool | int:
    text = str(value).lower()
    if known[name] == _FLAG and text in ("true", "false"):
        return text == "true"
    if known[name] == _COUNT and text.isascii() and text.isdigit() and int(text):
        return int(text)
    raise InputError(f"option {name!r} is {known[name]}", **facts)


def _format_name(name: str) -> str:
    """Return the name of an option, unless it may be a secret, such as a signature without name."""
    return repr(name) if re.fullmatch(r"[A-Za-z._-]{1,30}", name) else "of that name"


def _example(role: str) -> str:
    return "jsonl:words.jsonl" if role == "source" else "stdout"


def parse_function(text: str) -> tuple[str, str]:
    """Read `NAME=module:function`.

    Raises:
        InputError: it is invalid.
    """
    name, _, target = text.partition("=")
    module, _, function = target.partition(":")
    if not (name and module and function):
        raise InputError(
            "a function is bound as NAME=module:function",
            given=text,
            next_step="for example `--bind count-word=app.words:count`",
        )
    return name, target


# ---- the file ------------------------------------------------------------------------------------


def read_bindings(path: str | Path) -> BindingsText:
    """Read a bindings file.

    Raises:
        NotFoundError: there is no such file.
        InputError: it cannot be read.
        InvalidDefinition: it has errors; with all of them.
    """
    file = Path(path)
    try:
        from arroyo_dagster.state.storage.local_documents import read_document

        text = read_document(file).decode("utf-8-sig")
    except FileNotFoundError as error:
        raise NotFoundError("there is no such bindings file", path=str(file)) from error
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"the bindings file cannot be read ({error})", path=str(file)) from error
    diagnostics = Diagnostics()
    root = read_tree(text, diagnostics)
    bindings = _BindingsReader(file.parent).read(root) if root is not None else BindingsText()
    diagnostics.raise_if_any("bindings", str(file))
    return bindings


_SECTIONS = ("sources", "sinks", "functions", "env")


class _BindingsReader:
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def read(self, root: Node) -> BindingsText:
        if not isinstance(root.value, dict):
            root.report("E04", f"expected a mapping of {', '.join(_SECTIONS)}, found {root.kind}")
        for key, node in root.members.items():
            if key not in _SECTIONS:
                node.report("E04", f"unknown key; expected {', '.join(_SECTIONS)}")
            elif not isinstance(node.value, dict | None):
                node.report("E04", f"expected a mapping by name, found {node.kind}")
        return BindingsText(
            sources=self._topics(root.get("sources"), "source"),
            sinks=self._topics(root.get("sinks"), "sink"),
            functions=self._texts(root.get("functions"), "module:function"),
            env=self._texts(root.get("env"), "text"),
        )

    def _topics(self, node: Node | None, role: str) -> dict[str, TopicBinding]:
        bindings: dict[str, TopicBinding] = {}
        for topic, place in (node.members if node else {}).items():
            try:
                binding = self._topic(role, topic, place)
            except InputError as error:
                place.report("E04", error.message)
            else:
                if binding is not None:
                    bindings[topic] = self._relative(binding)
        return bindings

    def _topic(self, role: str, topic: str, node: Node) -> TopicBinding | None:
        if node.text is not None:
            return _binding(role, topic, node.text)
        kinds = [key for key in node.members if key in _OPTIONS[role]]
        if len(kinds) != 1:
            kinds_of_role = ", ".join(_OPTIONS[role])
            node.report("E04", f"expected `KIND:PATH` or a mapping with one of {kinds_of_role}")
            return None
        member = node.members[kinds[0]]
        target = member.value
        if isinstance(target, dict | tuple):
            member.report("E04", f"expected a path behind {kinds[0]}, found {member.kind}")
            return None
        options = {key: option.plain() for key, option in node.members.items() if key != kinds[0]}
        return checked_binding(
            role, topic, kinds[0], "" if target in (None, True) else str(target), options
        )

    def _relative(self, binding: TopicBinding) -> TopicBinding:
        if binding.kind not in FILE_KINDS or "://" in binding.target:
            return binding
        return TopicBinding(
            role=binding.role,
            topic=binding.topic,
            kind=binding.kind,
            # Joined as text, to keep the final `/` that marks a directory.
            target=os.path.join(self._folder, binding.target),
            options=binding.options,
        )

    def _texts(self, node: Node | None, expected: str) -> dict[str, str]:
        texts: dict[str, str] = {}
        for name, place in (node.members if node else {}).items():
            if place.text is None or (":" in expected and ":" not in place.text):
                place.report("E04", f"expected {expected}, found {place.kind}")
            else:
                texts[name] = place.text
        return texts
