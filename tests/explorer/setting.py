"""A world, and what can be made to happen in it: the processes of one job, and what goes wrong."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from arroyo_dagster.state import GcRequest, JobPaths, PlanKind, Retention
from arroyo_dagster.state.model.garbage import GRACE_MICROS
from tests.explorer import ours
from tests.explorer.arroyo import Controller, Leader, LegacyRun
from tests.explorer.oracle import Watch
from tests.explorer.truth import Edited
from tests.explorer.world import DAY, HOUR, SECOND, WRITERS, Clock, Process, World
from tests.formats import GRACE_FLOOR_MICROS, Rescale
from tests.internals import AssumedJobs, JobDirectory

FAULTS = ("crash", "crash", "crash-after", "crash-after", "fail", "fail-after", "half", "throttled")
NARROW = (
    *("/epochs/epoch-", "/epochs/epoch-", "/checkpoint-manifest.pb", "/committed.json"),
    *("/generation-manifest.json", "/metadata", "/compactions/"),
)
NARROW_TOO = ("/retained.json", "/epochs/epoch-", "/checkpoint-manifest.pb", "/metadata", "/table-")


@dataclass
class Setting:
    """A world, and what can be made to happen in it to one job.

    Attributes:
        beside: another job below the same URL.
        url: below which it lies: a prefix of full paths.
        clocks: draws the clock of a host, by what runs there.
        ages: whether the oracle looks at the ages of epochs.
    """

    world: World
    watch: Watch
    job: ours.Job
    controller: Controller | None
    chance: random.Random
    count: int = 0
    beside: JobPaths | None = None
    url: str = ""
    clocks: Callable[[str], Clock | None] = lambda role: None
    ages: bool = False

    @property
    def paths(self) -> JobPaths:
        return self.job.paths

    def _process(
        self, name: str, role: str, work: Callable[[Process], Any], fault: bool, calls: int
    ) -> Process:
        self.count += 1
        process = Process(f"{name} {self.count}", role, work, root=self.url + self.paths.root)
        process.url, process.clock = self.url, self.clocks(role)
        process.fault = self.chance.choice(FAULTS)
        if fault and self.chance.random() < 0.5:
            process.fault_at = self.chance.randint(1, calls)
        elif fault:
            process.fault_on = self.chance.choice(NARROW if role in WRITERS else NARROW_TOO)
        return process

    def writer(
        self, epochs: int, *, fault: bool = False, stop: bool | None = None, fresh: bool = True
    ) -> Process:
        """The job's own writer, started anew.

        Args:
            fresh: whether it may be told to ignore the state, in Arroyo's legacy layout.
        """
        chance, world, controller = random.Random(self.chance.random()), self.world, self.controller
        if controller is None:
            return self._process(
                "writer",
                "writer",
                lambda process: ours.write_epochs(world, process, self.job, chance, epochs),
                fault,
                30 * epochs,
            )
        stops = chance.random() < 0.7 if stop is None else stop
        legacy = self.paths.pipeline is None
        afresh = legacy and fresh and chance.random() < 0.15

        def work(process: Process) -> str:
            if legacy:
                return LegacyRun(world, process, controller, chance).work(epochs, stops, afresh)
            return Leader(world, process, controller, chance).work(epochs, stops)

        return self._process("Arroyo", "arroyo", work, fault, 30 * epochs)

    def makers(self) -> list[Callable[..., Process]]:
        """What maintenance does, of a kind each."""
        found = [self.expiry, self.orphans, self.pin, self.expiry, self.orphans, self.undelete]
        if self.controller is None and self.paths.pipeline is not None:
            found += [self.compaction, self.compaction]
        if self.controller is None:
            found += [self.rollback, self.rollback]
        if self.controller is not None:
            found += [self.rewriting, self.rewriting, self.putting_back]
        return [*found, self.unpin, self.purge]

    def expiry(
        self, *, fault: bool = False, aside: bool | None = None, keep: int | None = None
    ) -> Process:
        """An expiry, by count or by age."""
        chance, protocol = self.chance, self.paths.pipeline is not None
        by_age = keep is None and chance.random() < (0.8 if self.ages else 0.4)
        keep = keep or chance.choice((2, 2, 3, 4))
        retention, keep_for = Retention(keep_epochs=keep), None
        if by_age:
            keep, keep_for = 2, chance.choice((0, SECOND, HOUR))
            if self.ages:
                keep, keep_for = None, chance.choice((HOUR, HOUR, DAY, 5 * DAY))
            retention = Retention(keep_micros=keep_for)
        if not protocol:
            self.watch.trap = 10
        asked = GcRequest(
            kind=PlanKind.EXPIRE,
            retention=retention,
            directory=ours.directory(self.controller),
            others=(),
        )
        return self._collector("expiry", asked, keep, fault, aside, keep_for if self.ages else None)

    def orphans(self, *, fault: bool = False) -> Process:
        """A collection of orphans."""
        asked = GcRequest(
            kind=PlanKind.ORPHANS,
            grace_micros=self.chance.choice((GRACE_FLOOR_MICROS, GRACE_FLOOR_MICROS, GRACE_MICROS)),
            directory=ours.directory(self.controller),
            others=(),
        )
        return self._collector("orphans", asked, None, fault)

    def removal(self, *, fault: bool = False, unreadable: bool = False) -> Process:
        """The removal of the job, which is known to be gone.

        Args:
            unreadable: even if nobody can read its metadata, moved aside then.
        """
        self.watch.dying = True
        gone = self.controller or AssumedJobs({str(self.paths.root): "gone"})
        asked = GcRequest(
            kind=PlanKind.DEAD_JOB,
            grace_micros=self.chance.choice((GRACE_FLOOR_MICROS, GRACE_MICROS)),
            directory=JobDirectory([gone]),
            others=() if self.beside is None else (self.beside,),
            unreadable=unreadable,
        )
        return self._collector("removal", asked, None, fault, aside=unreadable or None)

    def _collector(
        self,
        name: str,
        asked: GcRequest,
        keep: int | None,
        fault: bool,
        aside: bool | None = None,
        keep_for: int | None = None,
    ) -> Process:
        chance, world = self.chance, self.world
        what = ours.Collection(
            asked=asked,
            keep=keep,
            keep_for=keep_for,
            aside=chance.random() < 0.25 if aside is None else aside,
            early=chance.random() < 0.3,
            in_flight=chance.choice((1, 8)),
        )
        return self._process(
            name,
            "collector",
            lambda process: ours.gather(world, process, self.paths, self.watch, what),
            fault,
            90,
        )

    def compaction(self, *, fault: bool = False) -> Process:
        """A compaction of a job of ours."""
        return self._process(
            "compaction",
            "writer",
            lambda process: ours.compact(self.world, process, self.job),
            fault,
            60,
        )

    def rollback(self, *, fault: bool = False) -> Process:
        """A job of ours taken back to one of the epochs there are."""
        epoch = self.chance.choice(sorted(self.watch.epochs)[-5:] or [1])
        return self._process(
            "rollback",
            "writer",
            lambda process: ours.roll_back(self.world, process, self.paths, epoch),
            fault,
            40,
        )

    def rewriting(self, *, fault: bool = False) -> Process:
        """A rewrite of a job of Arroyo's."""
        return self._process(
            "rewriting",
            "rewriter",
            lambda process: ours.rewrite(self.world, process, self.paths, self.controller),
            fault,
            60,
        )

    def putting_back(self, *, fault: bool = False) -> Process:
        """The last rewrite undone."""
        return self._process(
            "putting back",
            "rewriter",
            lambda process: ours.put_back(self.world, process, self.paths, self.controller),
            fault,
            40,
        )

    def editing(self, chance: random.Random, *, fault: bool = False) -> Process:
        """An edit of the state."""
        what = ours.draw_edit(chance, managed=self.controller is None)
        return self._process(
            "editing",
            "writer" if self.controller is None else "rewriter",
            lambda process: ours.edit(
                self.world, process, self.paths, self.watch, self.controller, what
            ),
            fault,
            60,
        )

    def rescaling(self, chance: random.Random, *, fault: bool = False) -> Process:
        """The files of a stopped Arroyo job split for another parallelism, at which it is started
        next, or not.
        """
        assert self.controller is not None
        controller, parallelism = self.controller, chance.randint(1, 4)
        sets = chance.random() < 0.7
        what = ours.Editing(Rescale(parallelism=parallelism), False, Edited())

        def work(process: Process) -> str:
            done = ours.edit(self.world, process, self.paths, self.watch, controller, what)
            if done in ("edited", "nothing") and sets:
                controller.parallelism = parallelism
            return "rescaled" if done == "edited" else done

        return self._process("rescaling", "rewriter", work, fault, 60)

    def forking(
        self, source: Setting, chance: random.Random, *, fault: bool = False, epoch: bool = False
    ) -> Process:
        """The state of another Arroyo job taken over.

        Args:
            epoch: whether somebody names an epoch of the source; else its newest one.
        """
        named = chance.choice(sorted(source.watch.epochs) or [None]) if epoch else None
        return self._process(
            "forking",
            "rewriter",
            lambda process: ours.fork(self.world, process, self, source, named),
            fault,
            80,
        )

    def taking_back(self, chance: random.Random, *, fault: bool = False) -> Process:
        """A stopped Arroyo job taken back to one of the epochs there are."""
        epoch = chance.choice(sorted(self.watch.epochs)[-6:-1] or [1])
        return self._process(
            "taking back",
            "rewriter",
            lambda process: ours.take_back(self.world, process, self, epoch),
            fault,
            80,
        )

    def rebuilding(self, epoch: int, *, undo: bool = False, fault: bool = False) -> Process:
        """Metadata of an epoch that was lost written anew, or that undone."""
        return self._process(
            "unbuilding" if undo else "rebuilding",
            "rewriter",
            lambda process: ours.rebuild(self.world, process, self, epoch, undo=undo),
            fault,
            60,
        )

    def undoing(self, chance: random.Random, *, fault: bool = False) -> Process:
        """The newest edit undone."""
        if self.controller is not None:
            return self.putting_back(fault=fault)
        assumed = chance.random() < 0.75
        return self._process(
            "undoing",
            "writer",
            lambda process: ours.undo_edit(self.world, process, self.paths, self.watch, assumed),
            fault,
            40,
        )

    def pin(self, epoch: int | None = None, *, fault: bool = False) -> Process:
        """A pin of an epoch, or of one of those that there are."""
        chosen = epoch or self.chance.choice(sorted(self.watch.epochs) or [1])
        return self._process(
            "pin",
            "collector",
            lambda process: ours.pin(self.world, process, self.paths, self.watch, chosen),
            fault,
            30,
        )

    def unpin(self, *, fault: bool = False) -> Process:
        """The oldest pin taken back."""
        return self._process(
            "unpin",
            "collector",
            lambda process: ours.unpin(self.world, process, self.paths, self.watch),
            fault,
            15,
        )

    def undelete(self, *, fault: bool = False) -> Process:
        """What was moved aside brought back."""
        return self._process(
            "undelete",
            "collector",
            lambda process: ours.bring_back(self.world, process, self.paths, self.watch),
            fault,
            60,
        )

    def purge(self, *, fault: bool = False) -> Process:
        """What was moved aside deleted for good."""
        return self._process(
            "purge",
            "collector",
            lambda process: ours.purge_old(self.world, process, self.paths),
            fault,
            40,
        )
