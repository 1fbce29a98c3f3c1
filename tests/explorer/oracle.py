"""What must stay, by brute force over every metadata object; shares no code with what it judges.

Bytes are parsed with the generated protobuf classes and `json`; names are taken apart here.
"""

from __future__ import annotations

import base64
import functools
import json
import re
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

from arroyo_dagster.state.codec.maintenance_records import decode_compaction_record
from tests.explorer.truth import Truth
from tests.explorer.world import DAY, HOUR, Object, Process, Violation
from tests.formats import state_pb2 as pb

_NUMBER = "([0-9]{7}|[1-9][0-9]{7,})"
"""The one way in which an epoch is written in a name."""

RECORD = re.compile(rf"(.+)/epochs/epoch-{_NUMBER}\.record")
LEGACY_HEAD = re.compile(rf"([^/]+)/checkpoints/checkpoint-{_NUMBER}/metadata")
OPERATOR = re.compile(rf"([^/]+)/checkpoints/checkpoint-{_NUMBER}/operator-.+/metadata")
MANIFEST = "/checkpoint-manifest.pb"
METADATA = (MANIFEST, "/metadata", ".record")
OURS = "/_arroyo_dagster/"
CREATED_ONCE = re.compile(
    r".+(/epochs/epoch-\d+\.record|/checkpoint-manifest\.pb|/generation-manifest\.json"
    r"|/committed\.json|/_arroyo_dagster/(leases|writers)/\d+\.json)"
)
"""What decides who comes first: whoever creates it second must be told."""

KEEPING = ("/compactions/", "/quarantine/", "/retained", "/changes/")
"""Where maintenance says what must stay besides what epochs list."""


@functools.lru_cache(maxsize=20_000)
def listed(data: bytes, whole: bool) -> tuple[str, ...]:
    """The files that a manifest (`whole`), or the metadata of one operator, lists."""
    operators = (
        pb.CheckpointManifest.FromString(data).operators
        if whole
        else [pb.OperatorCheckpointMetadata.FromString(data)]
    )
    found: list[str] = []
    for operator in operators:
        for table in operator.table_checkpoint_metadata.values():
            if table.table_type == pb.GLOBAL_KEY_VALUE:
                one = pb.GlobalKeyedTableTaskCheckpointMetadata.FromString(table.data)
                found += one.files
            else:
                timed = pb.ExpiringKeyedTimeTableCheckpointMetadata.FromString(table.data)
                found += [file.file for file in timed.files]
    return tuple(found)


@functools.lru_cache(maxsize=20_000)
def manifest_facts(data: bytes) -> tuple[int, str | None, bool, bool]:
    """Epoch, parent, whether it needs a commit, whether a job of ours wrote it."""
    one = pb.CheckpointManifest.FromString(data)
    parent = one.parent_checkpoint_ref if one.HasField("parent_checkpoint_ref") else None
    return one.epoch, parent, one.needs_commit, one.HasField("progress")


@functools.lru_cache(maxsize=20_000)
def legacy_operators(data: bytes) -> tuple[str, ...]:
    """The operators that checkpoint metadata of the legacy layout names."""
    return tuple(pb.CheckpointMetadata.FromString(data).operator_ids)


@functools.lru_cache(maxsize=1000)
def _outputs(data: bytes) -> tuple[str, ...]:
    record = decode_compaction_record(data, "a compaction record")
    return tuple(path for one in record.merged for path in one.output_paths)


@dataclass
class Watch:
    """Knows which epochs exist, and sees that nothing they need is taken away.

    Attributes:
        url: of its job; `objects` and paths are what lies below it.
        foreign: what users put there, in full.
        keep: the fewest epochs that anybody who expires was asked to keep; None: nobody was.
        keep_for: the shortest time that anybody was asked to keep them; likewise.
        by_age: whether anybody was asked to keep what is young, however many epochs that are.
        written: when each epoch was written, by the store's clock.
        fenced: whether nobody deletes once the holder of a later lease has.
        trap: how many epochs before the one that a start chooses Arroyo's cleaning up needs.
        restorable: the epoch that a start chooses, where somebody else decides that.
        pinned: epochs that somebody was told are pinned.
        lifted: those that somebody has begun, or ended, to unpin, in this order.
        epochs: what each epoch that exists needs.
        by_arroyo: what Arroyo itself has collected: it knows of no pins.
        dying: whether somebody has said that the job is gone.
        lost: whether a removal has deleted something that was not moved aside.
        sees_all: whether no listing is cut short.
        rewritten: when metadata was overwritten in place: of what was there by then Arroyo's own
            cleaning up must not take what the newest epoch lists; else two runs are to blame.
        gives_again: whether Arroyo gives names of old epochs again, and takes them for those.
        truth: the rows of each epoch; None: nobody looks at them.
    """

    objects: Any
    root: str
    protocol: bool
    ours: bool
    url: str = ""
    foreign: set[str] = field(default_factory=set)
    keep: int | None = None
    keep_for: int | None = None
    by_age: bool = False
    written: dict[int, int] = field(default_factory=dict)
    fenced: bool = False
    trap: int = 0
    restorable: Callable[[], int | None] = lambda: None
    pinned: set[int] = field(default_factory=set)
    lifted: list[int] = field(default_factory=list)
    epochs: dict[int, frozenset[str]] = field(default_factory=dict)
    clock: Callable[[], int] = lambda: 0
    by_arroyo: Any = field(default_factory=set)
    dying: bool = False
    lost: bool = False
    sees_all: bool = True
    rewritten: int = 0
    gives_again: Callable[[], bool] = lambda: False
    truth: Truth | None = None
    _aside: dict[str, set[str]] = field(default_factory=dict)
    _moved: set[str] = field(default_factory=set)
    _listed: set[str] = field(default_factory=set)
    _parents: dict[int, set[str]] = field(default_factory=dict)
    _protected: frozenset[str] | None = None
    _protected_until: int = 0
    _token: int = 0

    @property
    def place(self) -> str:
        """Where the job lies, in full."""
        return f"{self.url}{self.root}/"

    def look(self) -> None:
        """Find the epochs there are, after a start from stored objects."""
        pattern = RECORD if self.protocol else LEGACY_HEAD
        for path in sorted(self.objects):
            found = pattern.fullmatch(path)
            if found and found[1] == self.root:
                needs = self._needs(path, int(found[2]))
                if needs is not None and all(need in self.objects for need in needs):
                    self._exists(int(found[2]), needs)
        below = f"{self.root}{OURS}quarantine/"
        for path in [path for path in self.objects if path.startswith(below)]:
            self._moved_aside(path)
        self._pin_parents()

    def _exists(self, epoch: int, needs: frozenset[str]) -> None:
        """An epoch is there. Its metadata may be written over later, and be younger than it."""
        self.epochs[epoch] = needs
        self._listed |= needs
        if epoch not in self.written:
            heads = (one for one in needs if one.endswith(METADATA))
            self.written[epoch] = min(self.objects[one][1] for one in heads)

    # ---- what an epoch needs ---------------------------------------------------------------------

    def _needs(self, path: str, epoch: int) -> frozenset[str] | None:
        if self.protocol:
            return self._protocol_needs(path)
        needs = {path}
        for name in legacy_operators(self.objects[path][0]):
            operator = f"{self.root}/checkpoints/checkpoint-{epoch:07}/operator-{name}/metadata"
            needs.add(operator)
            if operator not in self.objects:
                return None
            needs.update(listed(self.objects[operator][0], False))
        return frozenset(needs)

    def _protocol_needs(self, path: str) -> frozenset[str] | None:
        ref = json.loads(self.objects[path][0])["checkpoint_ref"]
        if ref not in self.objects:
            return None
        data = self.objects[ref][0]
        return frozenset({path, ref, *self._marker(ref), *listed(data, True)})

    def _marker(self, ref: str) -> tuple[str, ...]:
        marker = ref.rpartition("/")[0] + "/committed.json"
        needs_commit = manifest_facts(self.objects[ref][0])[2]
        return (marker,) if needs_commit and marker in self.objects else ()

    def _of_parent(self, needs: Iterable[str]) -> set[str]:
        """What a start demands of the parent: that it is ready, not what it lists."""
        ref = next((one for one in needs if one.endswith(MANIFEST)), None)
        if ref is None or ref not in self.objects:
            return set()
        parent = manifest_facts(self.objects[ref][0])[1]
        if parent is None or parent not in self.objects:
            return set()
        epoch = manifest_facts(self.objects[parent][0])[0]
        return {parent, f"{self.root}/epochs/epoch-{epoch:07}.record", *self._marker(parent)}

    def protected(self) -> frozenset[str]:
        """Every object that nobody may take away now."""
        late = self.keep_for is not None and self.clock() >= self._protected_until
        if self._protected is None or late:
            numbers = sorted(self.epochs, reverse=True)
            stays = self.staying(numbers)
            found: set[str] = set()
            for number in stays:
                needs = self.epochs[number]
                found |= needs
                if self.protocol and number == numbers[0]:
                    found |= self._of_parent(needs)
                found |= self._parents.get(number, set())
            found |= self.waiting() | self.needed_aside() | self.undoable()
            self._protected = frozenset(found)
        return self._protected

    def needed_aside(self) -> set[str]:
        """What epochs that were moved aside list, and was not moved with them."""
        names = self._retained("quarantines")
        return set().union(*(needs for name, needs in self._aside.items() if name in names))

    def has_aside(self) -> bool:
        """Whether something lies in quarantine."""
        return bool(self._retained("quarantines"))

    def _retained(self, what: str) -> list[Any]:
        found = self.objects.get(f"{self.root}{OURS}retained.json")
        return [] if found is None else list(json.loads(found[0])[what])

    def _moved_aside(self, path: str) -> None:
        name, _, part = path.removeprefix(f"{self.root}{OURS}quarantine/").partition("/")
        if not part.startswith("part-"):
            return
        lines = [
            line
            for path, (data, _, _) in self.objects.items()
            if path.startswith(f"{self.root}{OURS}quarantine/{name}/part-")
            for line in json.loads(data)["moved"]
        ]
        moved = {line[0] for line in lines}
        needs = set(self._aside.get(name, ()))
        for origin, copy, _, _ in lines:
            whole = origin.endswith(MANIFEST)
            if copy in self.objects and (whole or OPERATOR.fullmatch(origin)):
                needs.update(one for one in listed(self.objects[copy][0], whole))
        self._moved |= moved
        self._aside[name] = {path for path in needs - moved if path in self.objects}

    def waiting(self) -> set[str]:
        """What compactions have merged that wait for the writer: that no epoch has listed yet.

        Without what a removal has moved aside: only its own quarantine brings it back.
        """
        below = f"{self.root}{OURS}compactions/"
        found: set[str] = set()
        for path, (data, _, _) in self.objects.items():
            if path.startswith(below):
                found.update(_outputs(data))
        return {
            path for path in found - self._listed if path in self.objects or path not in self._moved
        }

    def undoable(self) -> set[str]:
        """What the newest epoch of a job of Arroyo's listed before it was rewritten in place."""
        below = f"{self.root}{OURS}changes/"
        # Also one that Arroyo's own cleanup has broken: the job has gone on.
        newest = max((*self.epochs, self.restorable() or 0), default=0)
        found: set[str] = set()
        for path, (data, _, _) in self.objects.items():
            if not path.startswith(below) or path.endswith("-rebuild.json"):
                continue
            record = json.loads(data)
            if record["epoch"] == newest:
                for name, text in record["before"].items():
                    found.update(listed(base64.b64decode(text), name.endswith(MANIFEST)))
        return found

    def staying(self, numbers: list[int]) -> list[int]:
        """The epochs that nobody was asked to expire."""
        if self.keep is None and self.keep_for is None:
            return numbers
        newest = self.restorable() or max(numbers, default=0)
        oldest = newest - self.trap
        there = self._newest_there(numbers)
        chain = self._lineage(numbers) if self.ours and self.protocol else there
        kept = set(numbers)
        if self.keep is not None:
            kept = set(there[: self.keep])
            if self.ours and self.protocol:
                # Those that a rollback has left behind stay as long as epochs of their numbers,
                # unless somebody has asked for an age.
                lately = {n for n in numbers if n > numbers[0] - self.keep}
                kept = {n for n in lately if n in chain or not self.by_age} | {*chain[:2]}
        if self.keep_for is not None:
            kept &= {*chain[:2], *self._young(numbers, self.keep_for)}
        return [n for n in numbers if n in kept or n in self.pinned or n >= oldest]

    def _young(self, numbers: list[int], keep_for: int) -> list[int]:
        """The epochs that are not as old as that yet."""
        now = self.clock()
        young = [n for n in numbers if now - self.written[n] < keep_for]
        self._protected_until = min((self.written[n] + keep_for for n in young), default=now + DAY)
        return young

    def _lineage(self, numbers: list[int]) -> list[int]:
        """The epochs that the newest one builds on, newest first, itself included."""
        found: list[int] = []
        number: int | None = numbers[0] if numbers else None
        while number in self.epochs:
            assert number is not None
            found.append(number)
            ref = next(one for one in self.epochs[number] if one.endswith(MANIFEST))
            parent = manifest_facts(self.objects[ref][0])[1] if ref in self.objects else None
            facts = self.objects.get(parent or "")
            number = None if facts is None else manifest_facts(facts[0])[0]
        return found

    def _chain(self) -> set[str]:
        """The manifests that exist, from the newest epoch's along the references to parents."""
        found: set[str] = set()
        needs = self.epochs[max(self.epochs)] if self.epochs else frozenset[str]()
        ref = next((one for one in needs if one.endswith(MANIFEST)), None)
        while ref is not None and ref in self.objects and ref not in found:
            found.add(ref)
            ref = manifest_facts(self.objects[ref][0])[1]
        return found

    def _newest_there(self, numbers: list[int]) -> list[int]:
        """The epochs that count: where Arroyo has cleaned up also those it has taken files of."""
        if self.protocol or self.ours:
            return numbers
        found = (LEGACY_HEAD.fullmatch(path) for path in self.objects)
        return sorted({int(one[2]) for one in found if one and one[1] == self.root}, reverse=True)

    def expires(
        self, keep: int | None, keep_for: int | None = None, *, by_age: bool = False
    ) -> None:
        """Somebody begins to expire epochs but the newest `keep`, or those younger than that."""
        self.by_age = self.by_age or by_age
        if keep is not None:
            self.keep = keep if self.keep is None else min(self.keep, keep)
        if keep_for is not None:
            self.keep_for = keep_for if self.keep_for is None else min(self.keep_for, keep_for)
        self._protected = None

    def pin(self, epochs: set[int]) -> None:
        """From now on these are pinned, and no others."""
        for epoch in epochs - self.epochs.keys():
            self._came_back(epoch)
        lost = [e for e in epochs - self.pinned if not self.whole(e)]
        self.pinned = set(epochs)
        self._pin_parents()
        if lost and self.ours:
            raise Violation(f"epoch {lost[0]} was pinned, and is not whole")

    def lift(self, epoch: int) -> None:
        """Somebody unpins an epoch."""
        self.lifted.append(epoch)
        self.pin(self.pinned - {epoch})

    def _came_back(self, epoch: int) -> None:
        """An epoch of which files were moved aside, and its record was not."""
        path = f"{self.root}/checkpoints/checkpoint-{epoch:07}/metadata"
        if self.protocol:
            path = f"{self.root}/epochs/epoch-{epoch:07}.record"
        needs = self._needs(path, epoch) if path in self.objects else None
        if needs is not None and needs <= self.objects.keys():
            self._exists(epoch, needs)

    def _pin_parents(self) -> None:
        """The parent of a pinned epoch stays if it was there when that was pinned."""
        known = self._parents
        self._parents = {}
        for epoch in self.pinned:
            parent = self._of_parent(self.epochs.get(epoch, ())) if self.protocol else set()
            if epoch in known or all(path in self.objects for path in parent):
                self._parents[epoch] = known.get(epoch, parent)
        self._protected = None

    def whole(self, epoch: int) -> bool:
        """Whether an epoch exists with all it needs."""
        needs = self.epochs.get(epoch)
        return needs is not None and all(path in self.objects for path in needs)

    # ---- what happens ----------------------------------------------------------------------------

    def __call__(self, process: Process, verb: str, path: str, before: Object | None) -> None:
        """A change was made."""
        if not path.startswith(self.root + "/"):
            return
        if OURS in path:
            if any(one in path for one in KEEPING):
                self._protected = None
            if verb != "delete" and "/quarantine/" in path:
                self._moved_aside(path)
            return
        if verb == "delete":
            self._deleted(process, path, before)
        else:
            self._written(process, verb, path, before)

    def _deleted(self, process: Process, path: str, before: Object | None) -> None:
        if process.role == "arroyo":
            for needs in self._aside.values():
                needs.discard(path)
            lost = [n for n, needs in self.epochs.items() if path in needs]
            # After ignore_state the names of old epochs are given again: Arroyo's own mistake.
            old = before is not None and before[1] < self.rewritten and not self.gives_again()
            if old and path in self._newest_needs():
                raise Violation(f"{process.name} took {path}, which its newest epoch lists")
            for number in lost:
                del self.epochs[number]
            self._protected = None
            return
        if process.name.startswith(("unbuilding", "putting back")) and self.truth is not None:
            if path not in self.truth.built:
                raise Violation(f"{process.name} deleted {path}, which no rebuild has written")
            self.by_arroyo.add(path)
            return
        if process.name.startswith("removal"):
            assert before is not None
            self._removed(process, path, before)
        elif path in self.protected():
            who = [n for n, needs in self.epochs.items() if path in needs]
            raise Violation(f"{process.name} deleted {path}, which epochs {who} need")
        if self.fenced and process.token:
            if process.token < self._token:
                raise Violation(f"{process.name} deleted {path}, and a later lease's holder has")
            self._token = process.token
        if process.role == "collector" and process.name.startswith("orphans"):
            assert before is not None
            if self.clock() - before[1] < HOUR:
                raise Violation(f"{process.name} deleted {path}, written within the last hour")
        if process.name.startswith("expiry"):
            assert before is not None
            self._oldest_first(process, path, before[0])
        for number in [n for n, needs in self.epochs.items() if path in needs]:
            del self.epochs[number]
            self._protected = None

    def _newest_needs(self) -> frozenset[str]:
        """What the newest epoch lists, even where Arroyo's own cleaning up has broken it.

        After a run that ignored the state it breaks every epoch for a while. The newest one that is
        whole is an old one then, which its retention may take.
        """
        newest = max((*self.epochs, self.restorable() or 0), default=0)
        if newest in self.epochs:
            return self.epochs[newest]
        head = f"{self.root}/checkpoints/checkpoint-{newest:07}/metadata"
        needs = self._needs(head, newest) if head in self.objects else None
        return needs or frozenset()

    def _removed(self, process: Process, path: str, before: Object) -> None:
        """Of a job that is gone everything may go, once nobody cares for it any more."""
        if self.pinned:
            raise Violation(f"{process.name} deleted {path}, and epochs {self.pinned} are pinned")
        if path in self.needed_aside():
            raise Violation(f"{process.name} deleted {path}, which could not come back whole")
        if self.clock() - before[1] < HOUR:
            raise Violation(f"{process.name} deleted {path}, written within the last hour")
        self.lost = self.lost or path not in self._moved
        if path.endswith("/current-generation.json") and self.sees_all:
            left = self.left()
            if left:
                raise Violation(f"{process.name} deleted the fence, and {left[0]} is there")

    def left(self) -> list[str]:
        """What is there of the job but what maintenance keeps, for itself or for quarantine."""
        root, kept = f"{self.root}/", self.needed_aside()
        for name in self._retained("quarantines"):
            index = self.objects.get(f"{self.root}{OURS}quarantine/{name}/index.json")
            kept |= set() if index is None else {*json.loads(index[0])["needs"]}
        its = (path for path in self.objects if path.startswith(root) and OURS not in path)
        return [path for path in its if path not in kept and self.url + path not in self.foreign]

    def _oldest_first(self, process: Process, path: str, data: bytes) -> None:
        """An epoch that goes before its parent would leave a gap, were it the last to go."""
        found = LEGACY_HEAD.fullmatch(path)
        parent = manifest_facts(data)[1] if path.endswith(MANIFEST) else None
        if found is not None:
            parent = f"{self.root}/checkpoints/checkpoint-{int(found[2]) - 1:07}/metadata"
        if parent is None or parent not in self.objects:
            return
        pinned = {pin["epoch"] for pin in self._retained("pins")}  # lifted or not
        older = int(found[2]) - 1 if found else manifest_facts(self.objects[parent][0])[0]
        if older in pinned:
            return
        record = f"{self.root}/epochs/epoch-{older:07}.record"
        if self.protocol and record not in self.objects and parent not in self._chain():
            return  # rolled back, so only its record led to it, and its writer has deleted that
        needs = [self.epochs.get(pin, frozenset()) for pin in pinned]
        if self.protocol and self.epochs:
            needs.append(self.epochs[max(self.epochs)])  # its parent may be much older
        kept = set().union(*needs, *(self._of_parent(one) for one in needs))
        if parent not in kept:
            raise Violation(f"{process.name} deleted {path} before its parent")

    def _written(self, process: Process, verb: str, path: str, before: Object | None) -> None:
        pattern = RECORD if self.protocol else LEGACY_HEAD
        found = pattern.fullmatch(path)
        if process.name.startswith("rebuilding") and self.truth is not None:
            self.truth.built.add(path)
        if self.truth is not None and self.objects[path][0] == self.truth.cut.get(path):
            return  # an undo has put back what was left of it
        if found is None:
            marker = path.endswith(("/committed.json", MANIFEST))
            self._protected = None if marker else self._protected
            if marker:
                self._marked(path)
            if self.truth is not None and path.endswith(MANIFEST):
                self.truth.wrote(process, path)
            if self.truth is not None and (path.endswith(MANIFEST) or OPERATOR.fullmatch(path)):
                self.truth.remember(path)
            self._check_overwritten(process, path, before)
            was_cut = before is not None and self.truth and before[0] == self.truth.cut.get(path)
            if process.role == "rewriter" and before is not None and not was_cut:
                self._rewritten(process, path)
                if self.truth is not None:
                    self.truth.overwritten(process, path, before)
            elif process.role == "rewriter" and self.truth is not None:
                if path in self.truth.lost and not self.truth.is_lost:
                    self._rewritten(process, path)
                self.truth.rebuilt(process, path, self._began(path))
            elif process.role == "arroyo" and before is not None and OPERATOR.fullmatch(path):
                self._written_over(path)
            return
        epoch = int(found[2])
        needs = self._needs(path, epoch)
        missing = sorted(need for need in needs or () if need not in self.objects)
        if missing and self.by_arroyo.issuperset(missing):
            return  # after ignore_state its cleanup takes what the new run has written
        if needs is None or missing:
            newest = max(self.epochs, default=0)
            if epoch <= newest and process.role == "collector":
                return  # a note of the oldest epoch, in metadata that has just expired
            raise Violation(f"epoch {epoch} came to exist without {missing[:1] or 'its metadata'}")
        self._exists(epoch, needs)
        self._protected = None
        if self.truth is not None and not self.dying:
            self.truth.appeared(process, epoch, needs)

    def _rewritten(self, process: Process, path: str) -> None:
        """The metadata of an epoch was overwritten, on purpose."""
        for number, needs in self.epochs.items():
            if path not in needs:
                continue
            head = next(p for p in needs if (RECORD if self.protocol else LEGACY_HEAD).fullmatch(p))
            now = self._needs(head, number)
            missing = sorted(one for one in now or () if one not in self.objects)
            if now is None or not self.by_arroyo.issuperset(missing):
                raise Violation(f"{process.name}: epoch {number} now needs {missing[:1]}")
            self.epochs[number] = now
        self.rewritten = self.clock()
        self._protected = None

    def _began(self, path: str) -> int:
        """When an epoch was begun that a rebuilt metadata object is of."""
        directory = re.sub(r"/operator-.+", "", path)
        if path.endswith(MANIFEST):
            return int(pb.CheckpointManifest.FromString(self.objects[path][0]).start_time)
        head = self.objects.get(f"{directory}/metadata")
        return 0 if head is None else int(pb.CheckpointMetadata.FromString(head[0]).start_time)

    def _written_over(self, path: str) -> None:
        """A run of Arroyo's that a newer one had replaced wrote an operator's metadata again."""
        for number in [n for n, needs in self.epochs.items() if path in needs]:
            head = next(p for p in self.epochs[number] if LEGACY_HEAD.fullmatch(p))
            now = self._needs(head, number) if head in self.objects else None
            if now is None or any(one not in self.objects for one in now):
                del self.epochs[number]
            else:
                self._exists(number, now)
        self._protected = None

    def _marked(self, path: str) -> None:
        directory = path.rpartition("/")[0]
        for number, needs in self.epochs.items():
            if directory + MANIFEST in needs and path.endswith("committed.json"):
                self.epochs[number] = needs | {path}

    def _check_overwritten(self, process: Process, path: str, before: Object | None) -> None:
        if process.role != "collector" or before is None:
            return
        if path in self.protected() and self.objects[path][0] != before[0]:
            raise Violation(f"{process.name} wrote over {path}")


@dataclass
class Watches:
    """Tells each job's watch of what happens to it, and sees that nobody touches another's.

    Attributes:
        foreign: what users put beside what is ours, in full.
        inner: the places of jobs of other URLs, in full, with the prefix of each URL.
    """

    of: tuple[Watch, ...]
    foreign: set[str] = field(default_factory=set)
    inner: dict[str, str] = field(default_factory=dict)

    def __call__(self, process: Process, verb: str, path: str, before: Object | None) -> None:
        """A change was made."""
        if process.role == "admin":
            return
        if process.role in ("collector", "rewriter") and not path.startswith(f"{process.root}/"):
            raise Violation(f"{process.name} touched another job: {verb} {path}")
        if path in self.foreign:
            raise Violation(f"{process.name} touched a user's object: {verb} {path}")
        url = next((url for place, url in self.inner.items() if path.startswith(place)), "")
        if process.url != url:
            raise Violation(f"{process.name} touched another URL: {verb} {path}")
        if verb == "create" and before is not None and CREATED_ONCE.fullmatch(path):
            raise Violation(f"{process.name} created {path}, which was there")
        for watch in self.of:
            if path.startswith(watch.place) and watch.url == url:
                watch(process, verb, path[len(watch.url) :], before)


class TakenByArroyo(Exception):
    """A start fails, and Arroyo's own cleaning up is why."""


def restored(
    objects: Any, root: str, number: int, *, follow: bool, by_arroyo: Collection[str] = ()
) -> str | None:
    """What a start of worker generation `number` goes on from, or claims (arroyo-state.md 3.3).

    Args:
        follow: go on along the epoch records, as our own jobs do.
        by_arroyo: what Arroyo itself has collected.

    Raises:
        Violation: it fails.
        TakenByArroyo: it fails because of two runs of Arroyo's at once: one has cleaned up what the
            other went on from.
    """
    for generation in range(number - 1, -1, -1):
        found = objects.get(f"{root}/generations/{generation}/generation-manifest.json")
        if found is None:
            continue
        fields = json.loads(found[0])
        refs = [fields.get("latest_checkpoint_ref"), fields.get("base_checkpoint_ref")]
        for ref in dict.fromkeys(ref for ref in refs if ref):
            chosen = _candidate(objects, root, ref, by_arroyo)
            if chosen is not None:
                return _followed(objects, root, chosen) if follow else chosen
    return None


def _candidate(objects: Any, root: str, ref: str, by_arroyo: Collection[str]) -> str | None:
    if ref not in objects:
        return None
    epoch, parent, _, _ = manifest_facts(objects[ref][0])
    if parent is not None and not _ready(objects, root, parent):
        if parent in by_arroyo:
            raise TakenByArroyo(parent)
        raise Violation(f"a start fails: the parent {parent} of {ref} is not ready")
    owner = _owner(objects, root, epoch)
    if owner is None or owner == ref:
        return ref  # the start claims it
    if owner not in objects:
        raise Violation(f"a start fails: {owner} owns epoch {epoch} and is not there")
    return _candidate(objects, root, owner, by_arroyo)


def _followed(objects: Any, root: str, ref: str) -> str:
    while True:
        following = _owner(objects, root, manifest_facts(objects[ref][0])[0] + 1)
        if following is None:
            return ref
        if following not in objects:
            raise Violation(f"a start fails: {following} owns its epoch and is not there")
        ref = following


def _owner(objects: Any, root: str, epoch: int) -> str | None:
    record = objects.get(f"{root}/epochs/epoch-{epoch:07}.record")
    return None if record is None else str(json.loads(record[0])["checkpoint_ref"])


def _ready(objects: Any, root: str, ref: str) -> bool:
    if ref not in objects:
        return False
    epoch, _, needs_commit, _ = manifest_facts(objects[ref][0])
    marker = ref.rpartition("/")[0] + "/committed.json"
    return _owner(objects, root, epoch) == ref and (not needs_commit or marker in objects)
