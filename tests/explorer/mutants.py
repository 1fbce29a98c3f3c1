"""Ways to break garbage collection, one at a time: the tests must find each."""

from __future__ import annotations

import importlib
import importlib.util
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

from arroyo_dagster.engine import merged_files
from arroyo_dagster.state import Layout
from arroyo_dagster.state.codec import gc as codec
from arroyo_dagster.state.metadata import lease as lease_module
from arroyo_dagster.state.model.aliases import ReferencedPaths
from arroyo_dagster.state.operations.compaction import rewrite as rewriting
from arroyo_dagster.state.operations.compaction import rewrite_preconditions as rewriting_scene
from arroyo_dagster.state.operations.compaction import rewrite_publish as rewriting_publish
from arroyo_dagster.state.operations.gc import execute as collecting
from arroyo_dagster.state.operations.gc import inventory as inventory
from arroyo_dagster.state.operations.gc import plan as gc_plans
from arroyo_dagster.state.operations.gc import root_reader as roots_read
from arroyo_dagster.state.operations.gc import roots_protocol
from arroyo_dagster.state.operations.gc import steps as collecting_steps
from arroyo_dagster.state.operations.surgery import carried_files, transfer
from arroyo_dagster.state.operations.surgery import execute as editing
from arroyo_dagster.state.operations.surgery import plan as edit_plans
from arroyo_dagster.state.operations.surgery.managed import execute as managed_edits
from arroyo_dagster.state.operations.surgery.managed import plan as managed_plans
from arroyo_dagster.state.operations.surgery.rebuild import operator as rebuilding
from arroyo_dagster.state.operations.verify import edits as verified_edits
from arroyo_dagster.state.planning.gc import dead_jobs, expiry, orphans
from arroyo_dagster.state.planning.gc.orphans import Reason
from arroyo_dagster.state.planning.verify import edits as planned_edits
from tests.explorer import world
from tests.explorer.remembering import NAMES
from tests.formats import JobPins, ObjectKind, Packed, objects


def _instead(owner: Any, name: str, value: Any) -> Callable[[], Any]:
    return lambda: mock.patch.object(owner, name, value)


@contextmanager
def _listing_trusted() -> Iterator[None]:
    """Epochs that a listing does not show are taken for gone."""
    found = inventory.read_inventory

    def trusting(*given: Any, **named: Any) -> Any:
        seen, known = found(*given, **named)
        there = {one.path for one in seen.metadata}
        kept = tuple(one for one in known.epochs if one.ref in there)
        return seen, replace(known, epochs=kept or known.epochs[:1])

    with (
        mock.patch.object(inventory, "check_listed", return_value=None),
        mock.patch.object(gc_plans, "read_inventory", trusting),
    ):
        yield


def _without_pins(self: roots_read.Reader) -> Any:
    return JobPins(), ()


def _orphan_at_once(standing: Any, one: Any, name: Any) -> Reason:
    return Reason.ORPHAN


@contextmanager
def _no_attempts() -> Iterator[None]:
    """Manifests that own no epoch yet, and that a start would claim."""
    with (
        mock.patch.object(inventory, "_with_attempts", lambda store, known, found: known),
        mock.patch.object(roots_protocol, "_unowned", return_value=()),
    ):
        yield


def _no_parents(known: Any) -> frozenset[Any]:
    return frozenset()


def _without_quarantine(self: roots_read.Reader) -> Any:
    return self.optional(self.paths.job_pins, codec.decode_pins) or JobPins(), ()


def _newest_first(self: collecting_steps.GcRun) -> None:
    plan = self.plan
    self._step("data", plan.data, self.delete)
    self._step("records", plan.records, collecting_steps.delete_here)
    self._step("metadata", Packed(reversed(list(plan.metadata))), collecting_steps.delete_here)


def _metadata_first(self: collecting_steps.GcRun) -> None:
    plan = self.plan
    for name in ("metadata", "records", "data"):
        self._step(name, getattr(plan, name), collecting_steps.delete_here)


@contextmanager
def _regardless() -> Iterator[None]:
    """Metadata is overwritten although the job runs, or was started meanwhile."""
    with (
        mock.patch.object(rewriting, "check_may", return_value=None),
        mock.patch.object(edit_plans, "check_may", return_value=None),
        mock.patch.object(rewriting_scene.Unchanged, "check", return_value=None),
        mock.patch.object(rewriting_publish, "check_quiet", return_value=None),
    ):
        yield


MUTANTS: dict[str, Callable[[], Any]] = {
    "pins are ignored": _instead(roots_read.Reader, "pins_in_full", _without_pins),
    "the parent of the newest epoch is skipped": _instead(
        expiry, "_needed_by_recovery", lambda roots, *asked: roots.current[:1]
    ),
    "the parents of pinned epochs are skipped": _instead(expiry, "_parents_of_pinned", _no_parents),
    "a listing that is cut short is trusted": _listing_trusted,
    "there is no grace period": _instead(orphans, "_young", lambda standing, one: None),
    "what a running job may write is not asked": _instead(
        orphans, "_reason_while_live", _orphan_at_once
    ),
    "the lease is not checked again": _instead(lease_module.Leased, "check", lambda self: None),
    "what a start would claim is ignored": _no_attempts,
    "the ten epochs that Arroyo's cleanup needs go": _instead(
        expiry, "LEGACY_EPOCHS_BEFORE_NEWEST", 0
    ),
    "files shared with epochs that stay go": _instead(
        expiry, "referenced_by", lambda known, stays: ReferencedPaths(known.paths.root)
    ),
    "compactions that wait are ignored": _instead(
        inventory, "_compactions", lambda store, roots, found: {}
    ),
    "what puts a rewrite back is ignored": _instead(
        inventory, "_changes", lambda store, roots, found: {}
    ),
    "a rewrite goes on whatever the job does": _regardless,
    "new lists stay although the job was started": _instead(
        rewriting_publish, "_put_back", lambda held, work, objects, reason: work.changed(reason)
    ),
    "what epochs in quarantine need is ignored": _instead(
        roots_read.Reader, "pins_in_full", _without_quarantine
    ),
    "newer epochs go before older ones": _instead(
        collecting_steps.GcRun, "carry_out", _newest_first
    ),
    "metadata goes before data": _instead(collecting_steps.GcRun, "carry_out", _metadata_first),
    "a stored plan is carried out as it is": _instead(
        collecting, "_checked", lambda held, plan, fresh: plan
    ),
    "the directory of jobs is not asked again": _instead(
        collecting_steps.StatusCheck, "__call__", lambda self: None
    ),
    "pins of a job that is gone are ignored": _instead(
        dead_jobs, "_check_unneeded", lambda roots, needed: None
    ),
    "a job that is gone may have been written to just now": _instead(
        dead_jobs, "_check_quiet", lambda roots, newest, old: None
    ),
}


# ---- rules of the newest release -----------------------------------------------------------------

_OLD_NAMES = {
    "_DIRECTORY": re.compile(
        r"(?:generations/(\d+)/)?checkpoints/checkpoint-(\d{7,})/(.+)", re.DOTALL
    ),
    "_GENERATION": re.compile(r"generations/(\d+)/generation-manifest\.json"),
    "_RECORD": re.compile(r"epochs/epoch-(\d{7,})\.record"),
    "_IN_CHECKPOINT": (
        (ObjectKind.DATA, re.compile(r"operator-.+/table-[^/]*-\d{3,}(?:-[^/]*)?", re.DOTALL)),
        (ObjectKind.SUBTASK, re.compile(r"operator-.+-\d+\.metadata", re.DOTALL)),
        (ObjectKind.OPERATOR, re.compile(r"operator-.+/metadata", re.DOTALL)),
    ),
}


@contextmanager
def _any_spelling() -> Iterator[None]:
    """Numbers of any spelling are parsed, and an operator is more than one segment of a path."""
    with ExitStack() as stack:
        for name, value in _OLD_NAMES.items():
            stack.enter_context(mock.patch.object(objects, name, value))
        for owner, name in NAMES:
            if name == "object_name":  # not the one that remembers what it said before
                stack.enter_context(mock.patch.object(owner, name, objects.object_name))
        yield


def _by_the_writers_clock(roots: Any, retention: Any, *, newest: Any, now_micros: int = 0) -> Any:
    """`expiry.oldest_staying`, of epochs as old as their writers say."""
    keeping = [one.epoch for one in roots.epochs[: retention.keep_epochs or 0]]
    if retention.keep_micros is not None:
        since = now_micros - retention.keep_micros
        keeping += [one.epoch for one in roots.epochs if one.finish_time_micros >= since]
    oldest = min(
        [*keeping, *(one.epoch for one in expiry._needed_by_recovery(roots, retention, newest))]
    )
    if roots.paths.layout is Layout.LEGACY:
        return min(oldest, max(0, newest - expiry.LEGACY_EPOCHS_BEFORE_NEWEST))
    return oldest


@contextmanager
def _writers_ages() -> Iterator[None]:
    with (
        mock.patch.object(expiry, "oldest_staying", _by_the_writers_clock),
        mock.patch.object(expiry, "check_clock", return_value=None),
    ):
        yield


def _held_by_its_holders_clock(self: Any, store_micros: int | None, here_micros: int) -> Any:
    return self.expires_at_micros if self.expires_at_micros > here_micros else None


MUTANTS |= {
    "names of any spelling are parsed": _any_spelling,
    "epochs are as old as their writers say": _writers_ages,
    "a store is not asked to prove its conditional create": _instead(
        world, "prove_conditional_create", None
    ),
}
if importlib.util.find_spec("arroyo_dagster.state.model.leases"):
    _leases = importlib.import_module("arroyo_dagster.state.model.leases")
    MUTANTS["a lease runs out by its holder's clock"] = _instead(
        _leases.LeaseRecord, "held_until", _held_by_its_holders_clock
    )

MUTANTS |= {
    "merges of older epochs are applied after an edit": _instead(
        merged_files,
        "adoptable",
        lambda operators, records, since: [one for record in records for one in record.merged],
    ),
    "an undo releases people's pins": _instead(managed_edits, "PINS_OF_REVISIONS", ("",)),
    "an edit is published whatever the job does": _regardless,
    "relative positions are applied twice": _instead(
        managed_plans, "_check_first_time", lambda store, paths, base, edit: None
    ),
}


def _shorter_lists(found: Callable[..., Any]) -> Callable[..., Any]:
    def shorter(*given: Any) -> Any:
        lists = found(*given)
        return lists[:-1] if len(lists) > 1 else lists

    return shorter


@contextmanager
def _rescale_loses_rows() -> Iterator[None]:
    """A file of those that are split is not listed, and nobody looks at what would be loaded."""
    with (
        mock.patch.object(editing, "_new_list", _shorter_lists(editing._new_list)),
        mock.patch.object(editing, "check_rescaled", return_value=""),
    ):
        yield


@contextmanager
def _half_of_a_rescale() -> Iterator[None]:
    """A rescale that was cut off is taken for an edit, of which half is another state."""

    def is_unfinished(record: Any, digests: Any) -> bool:
        return len({digests.get(at) == one for at, (one, _) in record.objects.items()}) == 2

    with (
        mock.patch.object(verified_edits, "is_unfinished", is_unfinished),
        mock.patch.object(planned_edits, "is_unfinished", is_unfinished),
    ):
        yield


def _own_watermarks(found: Callable[..., Any]) -> Callable[..., Any]:
    def kept(held: Any, prepared: Any, operator: Any, written: Any) -> Any:
        return replace(
            found(held, prepared, operator, written),
            min_watermark_micros=operator.min_watermark_micros,
            max_watermark_micros=operator.max_watermark_micros,
        )

    return kept


def _not_copied(source: Any, held: Any, target: Any, tables: Any) -> Any:
    planned = carried_files._planned(target, tables)
    return carried_files.WrittenFiles({(one.table.target, one.path): one.file for one in planned})


def _without_the_last(found: Callable[..., Any]) -> Callable[..., Any]:
    def fewer(*given: Any) -> Any:
        return {
            table: files if table == "g" else files[:-1] for table, files in found(*given).items()
        }

    return fewer


MUTANTS |= {
    "a rebuild leaves out a file of the epoch": _instead(
        rebuilding.LostOperator, "_files", _without_the_last(rebuilding.LostOperator._files)
    ),
    "a rescale loses rows": _rescale_loses_rows,
    "half of a rescale is taken for an edit": _half_of_a_rescale,
    "a rollback lists files of the older epoch": _instead(
        carried_files.WrittenFiles, "of", _not_copied
    ),
    "a fork leaves the watermarks": _instead(
        transfer, "_with_state", _own_watermarks(transfer._with_state)
    ),
}

FOUND_WITH: dict[str, tuple[str, ...]] = {
    "merges of older epochs are applied after an edit": ("edits",),
    "an undo releases people's pins": ("edits",),
    "an edit is published whatever the job does": ("edits",),
    "relative positions are applied twice": ("edits",),
    "a rebuild leaves out a file of the epoch": ("lost metadata",),
    "a rescale loses rows": ("rescales",),
    "half of a rescale is taken for an edit": ("rescales",),
    "a fork leaves the watermarks": ("forks",),
    "a rollback lists files of the older epoch": ("rollbacks",),
    "names of any spelling are parsed": ("foreign names",),
    "epochs are as old as their writers say": ("several clocks",),
    "a store is not asked to prove its conditional create": ("no conditional create",),
    "a lease runs out by its holder's clock": ("several clocks",),
}
"""The features of the schedules that find a mutant; none of the others."""
