"""Delete the rows of a key from everything that a job stores: edit the newest epoch, then delete
what older epochs, unlisted files and quarantine still hold.

Everything is deleted through the journal, under the job's lease, and only what no epoch that stays
refers to. It can be repeated after an interruption: a second call takes what is left.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from arroyo_dagster.errors import ConflictError, InputError, ProtocolError
from arroyo_dagster.state.codec.journal import RunHeader
from arroyo_dagster.state.codec.plain import plain_value
from arroyo_dagster.state.metadata.backend import ParquetBackend
from arroyo_dagster.state.metadata.expiry import delete_all
from arroyo_dagster.state.metadata.lease import Leased, LeaseOptions, lease
from arroyo_dagster.state.model.checkpoints import Checkpoint
from arroyo_dagster.state.model.garbage import JobPins, PlanKind, Retention
from arroyo_dagster.state.model.ids import Epoch, OperatorId, StatePath
from arroyo_dagster.state.model.job_facts import CheckpointFacts
from arroyo_dagster.state.model.layout import JobPaths, Layout
from arroyo_dagster.state.model.objects import Packed, StoredObject
from arroyo_dagster.state.model.surgery.edits import KeyDeletion
from arroyo_dagster.state.model.surgery.plans import EditOutcome, EditPlan
from arroyo_dagster.state.model.surgery.purge import (
    CatalogueRows,
    HeldObject,
    PurgeOutcome,
    PurgePlan,
)
from arroyo_dagster.state.operations.catalog.job_directory import JobDirectory
from arroyo_dagster.state.operations.gc.execute import GcOptions, run_gc
from arroyo_dagster.state.operations.gc.inventory import read_inventory
from arroyo_dagster.state.operations.gc.journal import Journal
from arroyo_dagster.state.operations.gc.pins import forget_rewrites, put_pins, read_pins, release
from arroyo_dagster.state.operations.gc.plan import GcRequest, plan_gc
from arroyo_dagster.state.operations.gc.quarantine import list_quarantines, purge_quarantine
from arroyo_dagster.state.operations.gc.roots import read_roots
from arroyo_dagster.state.operations.restore.carried import publish_carried, writer_lease
from arroyo_dagster.state.operations.restore.revision import BEFORE_EDIT
from arroyo_dagster.state.operations.restore.rollback import delivered_output
from arroyo_dagster.state.operations.surgery.entries import read_global_tables
from arroyo_dagster.state.operations.surgery.execute import EditOptions, run_edit
from arroyo_dagster.state.operations.surgery.find_key import (
    QUARANTINE,
    KeyRowsFound,
    KeySearch,
    find_key,
)
from arroyo_dagster.state.operations.surgery.managed.execute import run_managed_edit
from arroyo_dagster.state.operations.surgery.managed.plan import is_managed, plan_managed_edit
from arroyo_dagster.state.operations.surgery.plan import plan_edit
from arroyo_dagster.state.planning.gc.reachability import referenced_by
from arroyo_dagster.state.planning.restore.partially_collected import LEGACY_EPOCHS_BEFORE_NEWEST
from arroyo_dagster.state.storage.concurrency import concurrently
from arroyo_dagster.state.storage.store import ObjectStore
from arroyo_dagster.state.tables.known.catalogue import default_catalogue

_NOT_SEARCHED = (
    "not searched: exports, Dagster's catalogue, staged rows and records of topics, which hold no "
    "tables; sinks' output"
)


def plan_purge(
    store: ObjectStore, paths: JobPaths, directory: JobDirectory, edit: KeyDeletion
) -> PurgePlan:
    """Plan the purge of a key. Writes nothing: this is the dry run.

    Raises:
        InputError, NotFoundError, FormatError, ConflictError: as the plan of an edit.
    """
    return _prepare(store, paths, directory, edit)[0]


def _prepare(
    store: ObjectStore, paths: JobPaths, directory: JobDirectory, edit: KeyDeletion
) -> tuple[PurgePlan, KeySearch]:
    """Plan, and return what was found as well."""
    if edit.operator is not None:
        raise InputError(
            "a purge takes the key from all operators",
            job=paths.root,
            next_step="leave out --operator",
        )
    managed = is_managed(store, paths)
    edit = replace(edit, purge=True)
    planned = (plan_managed_edit if managed else plan_edit)(store, paths, directory, edit)
    search = find_key(store, paths, edit.values)
    listed = directory.look_up([paths], checkpoints=True)[0].facts.checkpoints
    return _PurgePlanning(store, paths, managed, planned, search, listed).plan(), search


@dataclass(frozen=True, slots=True)
class _PurgePlanning:
    store: ObjectStore
    paths: JobPaths
    managed: bool
    edit: EditPlan
    search: KeySearch
    listed: Sequence[CheckpointFacts] | None

    def plan(self) -> PurgePlan:
        backend = ParquetBackend(self.store, self.paths)
        existing = backend.every_epoch()
        going = self._last_holding()
        keep_from = None if going is None else Epoch(going + 1)
        expires = tuple(one for one in existing if going is not None and one <= going)
        pins = read_pins(self.store, self.paths)
        epochs = [backend.load_checkpoint_metadata(one) for one in self.search.epochs]
        return PurgePlan(
            edit=self.edit,
            objects=self._objects(),
            keep_from=keep_from,
            expires=expires,
            releases=tuple(
                pin.epoch
                for pin in pins.pins
                if pin.epoch in expires and not pin.released and _of_edit(pin.reason)
            ),
            quarantines=self._quarantines(),
            settles=self.managed
            and self.paths.layout is Layout.PROTOCOL
            and keep_from is not None
            and keep_from >= self._newest_afterwards(),
            delivered=tuple(delivered_output(epochs)),
            sinks=dict(_sinks(self.store, epochs[-1])),
            catalogue=self._catalogue(existing, keep_from),
            unknown=(*self.search.unknown, _NOT_SEARCHED),
            why_not=self.edit.why_not or self._needed(existing, pins, expires),
        )

    def _catalogue(
        self, existing: Sequence[Epoch], keep_from: Epoch | None
    ) -> CatalogueRows | None:
        """Return the rows of Arroyo's database that outlive their epochs."""
        if self.managed or self.paths.layout is not Layout.LEGACY:
            return None
        below = keep_from or min(existing)
        if self.listed is None:
            found = CatalogueRows(job=self.paths.job, below=below)
            return None if keep_from is None else found
        states = {one.epoch: one.state or "listed" for one in self.listed if one.epoch < below}
        return CatalogueRows(job=self.paths.job, below=below, states=states) if states else None

    def _last_holding(self) -> Epoch | None:
        """Return the newest epoch that holds the key once the edit is made; None = no epoch."""
        holding = {epoch for one in self.search.found for epoch in one.epochs}
        if not self.managed:
            holding -= {self.edit.epoch}  # it is edited in place
        return max(holding, default=None)

    def _newest_afterwards(self) -> Epoch:
        publishes = None if self.edit.empty else self.edit.publishes
        return self.edit.epoch if publishes is None else publishes

    def _objects(self) -> tuple[HeldObject, ...]:
        digests = concurrently(lambda one: _sha256(self.store, one.path), self.search.found)
        return tuple(
            HeldObject(
                operator=one.operator,
                table=one.table,
                path=one.path,
                place=one.place,
                epochs=one.epochs,
                rows=one.rows,
                sha256=digest,
            )
            for one, digest in zip(self.search.found, digests, strict=True)
        )

    def _quarantines(self) -> tuple[str, ...]:
        """Return the quarantines with a copy that holds the key, or that keep a file which does."""
        held = {one.path for one in self.search.found}
        return tuple(
            quarantine.name
            for quarantine, moved in list_quarantines(self.store, self.paths)
            if held.intersection(one.copy for one in moved)
            or held.intersection(StatePath(text) for text in quarantine.needs.texts)
        )

    def _needed(
        self, existing: Sequence[Epoch], pins: JobPins, expires: Sequence[Epoch]
    ) -> str | None:
        """Return why an epoch that holds the key must stay; None = none must."""
        if not expires:
            return None
        for pin in pins.pins:
            if pin.epoch in expires and not pin.released and not _of_edit(pin.reason):
                return (
                    f"epoch {pin.epoch} is pinned by {pin.owner} ({pin.reason or 'no reason'}); "
                    f"release it with `arroyo-state unpin {self.paths.root} {pin.epoch}`"
                )
        newest = self._newest_afterwards()
        needed = 0 if self.managed else 1
        if self.paths.layout is Layout.LEGACY:
            needed = LEGACY_EPOCHS_BEFORE_NEWEST
        if expires[-1] >= newest - needed and needed:
            return (
                f"epoch {expires[-1]} holds the key, and a start may need it: edit the key without "
                f"--purge, start the job, and purge once epoch {expires[-1] + needed + 1} exists"
            )
        return None


def _of_edit(reason: str) -> bool:
    return reason.startswith(BEFORE_EDIT)


def _sha256(store: ObjectStore, path: StatePath) -> str:
    return hashlib.sha256(store.read(path)).hexdigest()


def _sinks(store: ObjectStore, newest: Checkpoint) -> Iterator[tuple[OperatorId, tuple[str, ...]]]:
    """Yield the sinks whose state names its targets, with the keys of that state."""
    catalogue = default_catalogue()
    operators = {
        one.operator
        for one in newest.operators
        for config in one.configs.values()
        if (catalogue.owner_of(one.operator, config) or "").endswith("sink")
    }
    chosen = replace(
        newest, operators=tuple(one for one in newest.operators if one.operator in operators)
    )
    for table in read_global_tables(store, chosen, catalogue):
        kind = table.form.key_type
        if kind is not None:
            keys = dict.fromkeys(str(plain_value(key, kind)) for _, key, _ in table.entries())
            yield table.operator.operator, tuple(keys)


# ---- execution -----------------------------------------------------------------------------------


def run_purge(
    store: ObjectStore,
    paths: JobPaths,
    directory: JobDirectory,
    edit: KeyDeletion,
    options: EditOptions | None = None,
) -> PurgeOutcome:
    """Delete a key from everything that a stopped job stores, and prove it by a last search.

    Edits before it can no longer be undone. If it is interrupted, the job has a restorable epoch at
    every point; a further call deletes what is left.

    Raises:
        InputError: the job is not at rest, or something that holds the key must stay.
        ConflictError: another plan was approved, or the job changed meanwhile.
        ProtocolError: what holds the key is needed after all; it was not deleted.
        StorageError: objects could not be deleted.
    """
    chosen = options or EditOptions()
    with lease(store, paths, chosen.owner, LeaseOptions.of(chosen)) as held:
        plan, search = _prepare(held, paths, directory, edit)
        if plan.why_not is not None:
            raise InputError(
                f"the key cannot be purged now: {plan.why_not}",
                job=paths.root,
                next_step="nothing was changed",
            )
        if chosen.approved is not None and chosen.approved != plan.digest:
            raise ConflictError(
                f"plan {chosen.approved} was approved, but the current plan is {plan.digest}",
                job=paths.root,
                next_step="review the new plan and approve it; nothing was changed",
            )
        if plan.empty:
            return PurgeOutcome(plan=plan)
        options = replace(chosen, approved=None)
        return _Purge(held, paths, directory, edit, options, plan, search).run()


@dataclass(slots=True)
class _Purge:
    held: Leased
    paths: JobPaths
    directory: JobDirectory
    edit: KeyDeletion
    options: EditOptions
    plan: PurgePlan
    search: KeySearch
    journals: tuple[str, ...] = ()

    def run(self) -> PurgeOutcome:
        edited = self._edited()
        backend = ParquetBackend(self.held, self.paths, clock=self.options.clock)
        if self.plan.settles:
            self._settle()
        self._release()
        for quarantine, _ in list_quarantines(self.held, self.paths):
            if quarantine.name in self.plan.quarantines:
                now = self.options.clock()
                self.journals += (
                    purge_quarantine(self.held, self.paths, quarantine, self.options.owner, now),
                )
        # Before the epochs go that tell how to read these files, and those that they list after.
        self._delete_unlisted()
        self._expire()
        self._delete_unlisted()
        left = self._find()
        present = concurrently(self.held.head, [one.path for one in self.plan.objects])
        return PurgeOutcome(
            plan=self.plan,
            edit=edited,
            epoch=backend.load().epoch,
            deleted=tuple(
                one.path
                for one, info in zip(self.plan.objects, present, strict=True)
                if info is None
            ),
            remaining=tuple(one.path for one in left),
            unsearched=bool(self.search.remains) or self.search.versions is not False,
            journal_runs=self.journals,
            done=True,
        )

    def _edited(self) -> EditOutcome | None:
        if self.plan.edit.empty:
            return None
        run = run_managed_edit if self.plan.edit.publishes is not None else run_edit
        options = replace(self.options, approved=self.plan.edit.digest)
        edit = replace(self.edit, purge=True)
        return run(self.held, self.paths, self.directory, edit, options)

    def _find(self) -> tuple[KeyRowsFound, ...]:
        tables = self.search.tables
        return find_key(self.held, self.paths, self.edit.values, tables=tables).found

    def _settle(self) -> None:
        """Publish the content of the newest epoch once more: recovery needs its parent, too."""
        clock = self.options.clock
        with writer_lease(self.held, self.paths, self.options.owner, clock) as held:
            backend = ParquetBackend(held, self.paths, clock=clock)
            newest = backend.load()
            backend.prepare_checkpoint_load(newest.epoch)
            started = backend.start()
            if started.restored is None or started.restored.ref != newest.ref:
                raise ConflictError(
                    "the job was started meanwhile",
                    job=self.paths.root,
                    epoch=newest.epoch,
                    next_step="stop it, then purge again",
                )
            assert newest.progress is not None
            publish_carried(
                backend,
                newest,
                newest.operators,
                epoch=Epoch(newest.epoch + 1),
                progress=replace(newest.progress, rolled_back_to=None, revises=None, final=True),
                min_epoch=newest.min_epoch,
                now_micros=clock(),
            )

    def _release(self) -> None:
        """Release what would undo edits and adopt old compactions: both refer to files of the key.

        The pin of the epoch that the edit has just been made of is among them.
        """
        keep_from = self.plan.keep_from

        def released(kept: JobPins) -> JobPins:
            of_edits = {
                pin.epoch
                for pin in kept.pins
                if _of_edit(pin.reason) and keep_from is not None and pin.epoch < keep_from
            }
            return release(kept, epochs=of_edits)

        put_pins(self.held, self.paths, released)
        forget_rewrites(self.held, self.paths, lambda name: True)
        # Rebuilds keep files that lost metadata may have listed.
        for directory in (self.paths.compactions, self.paths.rebuilds):
            delete_all(self.held, [info.path for info in self.held.list_dir(directory).objects])

    def _expire(self) -> None:
        keep_from = self.plan.keep_from
        if keep_from is None:
            return
        current = read_roots(self.held, self.paths).current
        stay = sum(one.epoch >= keep_from for one in current)
        request = GcRequest(
            kind=PlanKind.EXPIRE,
            retention=Retention(keep_epochs=max(2, stay)),
            directory=self.directory,
        )
        planned = plan_gc(self.held, self.paths, request)
        left = {
            one for one in ParquetBackend(self.held, self.paths).every_epoch() if one < keep_from
        }
        stays = sorted(left - set(planned.epochs))
        if stays:
            raise ProtocolError(
                f"epochs {', '.join(map(str, stays))} must stay: recovery needs them",
                job=self.paths.root,
                next_step="start the job, let it write further epochs, stop it, and purge again; "
                "the newest epoch no longer holds the key",
            )
        if planned.objects:
            outcome = run_gc(
                self.held,
                self.paths,
                request,
                GcOptions(owner=self.options.owner, clock=self.options.clock),
            )
            self.journals += () if outcome.run is None else (outcome.run,)

    def _delete_unlisted(self) -> None:
        """Delete the files of the key that nothing lists any more.

        No run can list them meanwhile: a managed job's runs are fenced, an Arroyo job is at rest.
        """
        found = self._find()
        unlisted = [one.path for one in found if not one.epochs and one.place != QUARANTINE]
        if not unlisted:
            return
        _, roots = read_inventory(self.held, self.paths)
        referenced = referenced_by(roots, (*roots.epochs, *roots.attempts))
        for path in unlisted:
            if path in referenced or referenced.resembles(path):
                raise ProtocolError(
                    "a file of the key is still needed, by an epoch that was begun and never came "
                    "to exist, or by quarantine",
                    job=self.paths.root,
                    path=path,
                    next_step="delete what is left of it with `arroyo-state gc run orphans "
                    f"{self.paths.root}`, then purge again",
                )
        infos = concurrently(self.held.head, unlisted)
        objects = [
            StoredObject(path, info.size_bytes, info.modified_micros, info.etag)
            for path, info in zip(unlisted, infos, strict=True)
            if info is not None
        ]
        header = RunHeader(
            kind="purge",
            plan=self.plan.digest,
            owner=self.options.owner,
            begun_at_micros=self.options.clock(),
            objects=len(objects),
            size_bytes=sum(one.size_bytes or 0 for one in objects),
        )
        journal = Journal.begin(self.held, self.paths, header)
        self.journals += (journal.name,)
        for number, batch in enumerate(Packed(objects).batches(), start=1):
            journal.write([(number, batch)], {})
            self._check_still_at_rest()
            delete_all(self.held, [one.path for one in batch])
            journal.write([(number, batch)], dict.fromkeys((one.path for one in batch), "deleted"))
        journal.end({"deleted": len(objects)})

    def _check_still_at_rest(self) -> None:
        """Check that an Arroyo job is still stopped; the runs of a managed one are fenced."""
        if is_managed(self.held, self.paths):
            return
        facts = self.directory.find(self.paths).facts
        if not facts.condition.at_rest:
            raise ConflictError(
                f"the job is now {facts.condition.value}, by {facts.source}",
                job=self.paths.root,
                next_step="stop it, then purge again for the rest",
            )
