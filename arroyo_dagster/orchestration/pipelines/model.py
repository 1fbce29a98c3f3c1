"""Pipelines as they are found below a checkpoint URL, and the list of them, with its JSON form."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

from arroyo_dagster.errors import FormatError, InputError
from arroyo_dagster.state.model.ids import path_error

if TYPE_CHECKING:
    from arroyo_dagster.state.model.layout import JobPaths
    from arroyo_dagster.state.planning.exports import TableExport

FORM = 1
"""The version of the JSON form of a list."""
_NEXT = (
    "use the release that wrote it; or remove it: the next listing makes a new one, in which a "
    "pipeline has the name that Arroyo gives it now"
)


@dataclass(frozen=True, slots=True)
class LineageEndpoint:
    """A source or a sink.

    Attributes:
        key: what it is outside of the pipeline, such as `("kafka", "orders")`.
        operator: the id of the operator that reads or writes it; of tables in the SQL of a pipeline
            whose state could not be read, as `source_TABLE` or `sink_TABLE`.
        connector: Arroyo's name of its kind; None = not known.
    """

    key: Key
    operator: str
    connector: str | None = None


@dataclass(frozen=True)
class ListedPipeline:
    """A pipeline: one job of Arroyo or of this package.

    Attributes:
        root: the directory of its state, `job` or `pipeline/job`.
        key: the parts of its asset keys between the deployment and the table.
        name: the name that its key is made of; None = the key is made of the root.
        current_name: its name as Arroyo last said.
        managed: whether it is a managed job; None = no epoch of it was ever read.
        sql: its SQL without the values of secret options, as Arroyo last said.
        epoch: the epoch from which its sources, sinks and operators were read; None = none was.
        operators: their ids; empty = not known.
    """

    root: str
    key: Key
    name: str | None = None
    current_name: str | None = None
    managed: bool | None = None
    sources: tuple[LineageEndpoint, ...] = ()
    sinks: tuple[LineageEndpoint, ...] = ()
    sql: str | None = None
    epoch: int | None = None
    operators: tuple[str, ...] = ()

    @property
    def ends(self) -> tuple[LineageEndpoint, ...]:
        """Its sources and sinks."""
        return self.sources + self.sinks

    @property
    def texts(self) -> set[str]:
        """The texts by which a user may call it."""
        names = {self.root, "/".join(self.key), self.name, self.current_name}
        return {name for name in names if name}

    @property
    def paths(self) -> JobPaths:
        """The paths of its job."""
        from arroyo_dagster.state.operations.catalog.jobs import paths_of

        return paths_of(self.root)


@dataclass(frozen=True)
class PipelineList:
    """The pipelines below a checkpoint URL.

    Attributes:
        pipelines: ordered by key.
        keys: each key that was ever given, by root; those of pipelines that left stay, so that no
            other pipeline gets them.
        listed_at_micros: the time of the listing that the list shows.
        problem: why a later listing changed nothing; None = the last one is this list.
        missing: the roots of pipelines that the last listing did not find.
        notes: what the last listing could not read, which changes no key.
    """

    url: str
    pipelines: tuple[ListedPipeline, ...] = ()
    keys: Mapping[str, Key] = field(default_factory=dict)
    listed_at_micros: int = 0
    problem: str | None = None
    missing: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @cached_property
    def by_root(self) -> Mapping[str, ListedPipeline]:
        """The pipelines by their roots."""
        return {pipeline.root: pipeline for pipeline in self.pipelines}

    def without(self, gone: Collection[str]) -> PipelineList:
        """Return the list without what the user says is gone.

        Args:
            gone: roots; of pipelines that the last listing did not find, also their names or keys.
        """
        left = tuple(
            job
            for job in self.pipelines
            if job.root not in gone and (job.root not in self.missing or job.texts.isdisjoint(gone))
        )
        return replace(self, pipelines=left)

    def exported_by(self, export: TableExport) -> set[str]:
        """Return the roots of the pipelines that an export covers, and that have its operator.

        Those whose operators are not known count as well. All that it covers, if none is known to
        have the operator: its run says so.
        """
        covered = {job.root: job.operators for job in self.pipelines if export.covers(job.paths)}
        having = {root for root, operators in covered.items() if export.operator in operators}
        unknown = {root for root, operators in covered.items() if not operators}
        return having | unknown if having else set(covered)

    def to_json(self) -> str:
        """Return the list as JSON; `from_json` reads it."""
        from arroyo_dagster.state.codec.derived import plain_values

        values = {"form": FORM, **plain_values(self), "keys": dict(sorted(self.keys.items()))}
        return json.dumps(values, ensure_ascii=False, indent=1)

    @classmethod
    def from_json(cls, text: str | bytes, where: str | None = None) -> PipelineList:
        """Read a list.

        Args:
            where: the name of the file, for errors.

        Raises:
            FormatError: it has another form.
        """
        from arroyo_dagster.state.codec.derived import decode_json, value_from_json

        try:
            data = text.encode(errors="replace") if isinstance(text, str) else text
            values = decode_json(data, where or "")
            if (form := values.pop("form", None)) != FORM:
                raise FormatError(f"form {form!r:.20}; this release reads form {FORM}")
            pipelines = value_from_json(cls, values)
            pipelines._check()
        except FormatError as error:
            raise FormatError(
                f"the list of pipelines cannot be read: {error.message}",
                next_step=_NEXT,
                path=where,
            ) from error
        return pipelines

    def _check(self) -> None:
        """Raise FormatError for values that no listing yields."""
        keys = {pipeline.root: pipeline.key for pipeline in self.pipelines}
        every = [*self.keys.values(), *(end.key for job in self.pipelines for end in job.ends)]
        if not all(key and all(key) for key in every):
            raise FormatError("a key has no parts, or an empty one")
        if any(path_error(root) or root.count("/") > 1 for root in keys):
            raise FormatError("a pipeline has a root that is none of a job")
        if len(keys) < len(self.pipelines) or len({*self.keys.values()}) < len(self.keys):
            raise FormatError("two pipelines have one root or key")
        if any(self.keys.get(root) != key for root, key in keys.items()):
            raise FormatError("the keys are not those of all pipelines")


# ---- free text as parts of asset keys, and names that Dagster can tell apart ---------------------
# Dagster makes the names of inputs and outputs from keys: only letters, digits, `_`, `-` and `.`
# may stand in them, and 1.12 refuses dots in dependencies. So a part of a key consists of letters,
# digits, `_` and `-` only: `orders hourly` becomes `orders--20hourly`.

Key = tuple[str, ...]
"""The parts of a key; each as `key_part` or `with_id` returns it."""

# A dash stays between ordinary characters: `--` begins an escape, and `---` never occurs.
_ESCAPED = re.compile(r"-(?![A-Za-z0-9_])|[^A-Za-z0-9_-]")
_SECOND = "---"
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9]+")


def key_part(name: str) -> str:
    """Return a name as part of an asset key; different names give different parts.

    Letters, digits and `_` stay, and `-` before one of them. Any other character becomes `--` and
    two hexadecimal digits, or `--u` and four, or `--U` and six.

    Raises:
        InputError: the name is empty.
    """
    if not name:
        raise InputError("an empty name cannot be part of an asset key")
    return _ESCAPED.sub(lambda match: _escape(ord(match[0])), name)


def _escape(code: int) -> str:
    if code < 0x100:
        return f"--{code:02x}"
    return f"--u{code:04x}" if code < 0x10000 else f"--U{code:06x}"


def with_id(part: str, identity: str) -> str:
    """Return the part for a second thing of the same name; `key_part` never returns it.

    Args:
        part: as `key_part` returns it.
        identity: tells the two apart, for example the id of a job.
    """
    return f"{part}{_SECOND}{key_part(identity)}"


def is_key_of(part: str, name: str | None) -> bool:
    """Return whether a part is that of a name, or of a second thing of this name."""
    return bool(name) and part.partition(_SECOND)[0] == key_part(name or "")


def layers(keys: Iterable[Key]) -> list[list[Key]]:
    """Split keys into the fewest lists in which Dagster can tell all keys apart; in their order.

    Dagster makes `__` or `_` of the border of two parts, and `_` of `-`: `a-b` and `a_b` are one
    name to it, and `a/b` and `a_b` are one name of an input.
    """
    layers: list[list[Key]] = []
    counts: dict[str, int] = {}
    for key in keys:
        name = _plain(key)
        layer = counts.get(name, 0)
        counts[name] = layer + 1
        if layer == len(layers):
            layers.append([])
        layers[layer].append(key)
    return layers


def group_names(keys: Iterable[Key], taken: Collection[str] = ()) -> dict[Key, str]:
    """Return a group name of Dagster for each key: letters, digits and `_`; no two are equal.

    Where two would be equal, the later ones of the sorted keys end in `_2`, `_3`…

    Args:
        taken: further names that no key gets.
    """
    names: dict[Key, str] = {}
    used = set(taken)
    for key in sorted(keys):
        base = name = _plain(key)
        number = 1
        while name in used:
            number += 1
            name = f"{base}_{number}"
        used.add(name)
        names[key] = name
    return names


def _plain(key: Key) -> str:
    return _NOT_IN_NAMES.sub("_", "_".join(key))
