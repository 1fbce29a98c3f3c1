"""Findings that only several epochs together show.

Files that a compaction lost or listed twice because it raced a barrier; file names that were used
again; merges that no run will adopt; positions of sources that go back.

Source: crates/arroyo-worker/src/job_controller/checkpoint_state.rs (arroyo-state.md 9.6, 9.7).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from arroyo_dagster.state.model.checkpoints import Checkpoint, OperatorCheckpoint
from arroyo_dagster.state.model.compaction import CompactionRecord
from arroyo_dagster.state.model.ids import StatePath, TableName
from arroyo_dagster.state.model.layout import is_compacted
from arroyo_dagster.state.model.tables import (
    ExpiringTimeKeyConfig,
    ExpiringTimeKeyFiles,
    GlobalKeyedFiles,
    TableFiles,
    TableKind,
    TimeFile,
)
from arroyo_dagster.state.planning.restore.checkpoint import cutoff_micros
from arroyo_dagster.state.planning.verify.edits import Explained
from arroyo_dagster.state.planning.verify.findings import (
    KEEP_AND_REPORT,
    Finding,
    either,
    error,
    note,
    warning,
)
from arroyo_dagster.state.planning.verify.starts import Origin, origin_of

_ANY = StatePath("any")
_ADD_AGAIN = "list a copy of it under a new name, or restore an epoch that lists it"


def across_findings(
    history: Sequence[Checkpoint],
    explained: Explained | None = None,
    undone: Explained | None = None,
) -> list[Finding]:
    """Find what was lost from one epoch to the next and still affects the last one.

    Args:
        history: consecutive visible epochs, oldest first; the last is the one that is verified.
        explained: by epoch, the files that an edit took from its lists on purpose.
        undone: by epoch, the files that an undone edit of the epoch before may have taken.
    """
    findings: list[Finding] = []
    for before, now in itertools.pairwise(history):
        revised = now.progress is not None and now.progress.revises == before.epoch
        if now.epoch == before.epoch + 1 and not revised:
            meant = (explained or {}).get(now.epoch, frozenset())
            origin = origin_of(before, now, meant)
            if origin is Origin.EMPTY:
                findings.append(_not_compared(before, now))
                continue
            steps = _step_findings(before, now, history[-1])
            steps = (step for step in steps if step.object not in meant)
            taken = (undone or {}).get(now.epoch, frozenset())
            for step in steps:
                if origin is Origin.UNKNOWN:
                    findings.append(_doubtful(now, step))
                else:
                    findings.append(_perhaps_taken(step) if step.object in taken else step)
    if history:
        findings += _doubled_findings(history[-1])
        findings += _reused_findings(history)
    return findings


def _not_compared(before: Checkpoint, now: Checkpoint) -> Finding:
    evidence = (
        f"epoch {now.epoch} is the first of a run that was started without state (ignore_state), "
        f"so its files are not compared with those of epoch {before.epoch}"
    )
    step = (
        "nothing, if the state was ignored on purpose; list no file of earlier epochs again: the "
        "ignored state would come back"
    )
    return note("not-compared", now.ref, evidence, step)


def _doubtful(now: Checkpoint, finding: Finding) -> Finding:
    """Return a finding about what is missing as it is where the run may have begun empty."""
    evidence = (
        f"{finding.evidence}; or the job was started without this state: the metadata does not tell"
    )
    step = (
        f"find out how the job was started before epoch {now.epoch}: if it ignored its state, "
        "nothing; else restore an epoch that lists the file"
    )
    return warning(finding.code, finding.object, evidence, step)


def _perhaps_taken(finding: Finding) -> Finding:
    """Return a finding about a file that an edit took, whose undo met a start of the job."""
    evidence = (
        f"{finding.evidence}; or the job goes on from the edit, whose undo came after its start"
    )
    step = "find out which state the job was started from: if the edited one, nothing; else restore"
    return warning(finding.code, finding.object, evidence, f"{step} an epoch that lists the file")


def _step_findings(before: Checkpoint, now: Checkpoint, last: Checkpoint) -> Iterator[Finding]:
    for operator in before.operators:
        after = now.operator(operator.operator)
        if after is None:
            evidence = (
                f"epoch {before.epoch} has operator {operator.operator}, {now.epoch} does not"
            )
            is_last = now is last
            yield either(is_last, "operator-vanished", now.ref, evidence, KEEP_AND_REPORT)
            continue
        for name, files in operator.tables.items():
            if name in after.tables and name not in after.configs:
                continue  # reported as a finding about the configuration
            if isinstance(files, ExpiringTimeKeyFiles):
                lost = _lost_files(operator, after, name, files, now, last)
            else:
                lost = _lost_pairs(after, name, files, now)
            for path, evidence in lost:
                sure = now.progress is None or files.kind is TableKind.GLOBAL_KEYED
                text = f"listed by {operator.operator}.{name} at epoch {before.epoch}, not at"
                yield either(sure, "file-lost", path, f"{text} {now.epoch}{evidence}", _ADD_AGAIN)


def _lost_files(
    operator: OperatorCheckpoint,
    after: OperatorCheckpoint,
    name: TableName,
    files: ExpiringTimeKeyFiles,
    now: Checkpoint,
    last: Checkpoint,
) -> Iterator[tuple[StatePath, str]]:
    listed = after.tables.get(name)
    present = listed.files if isinstance(listed, ExpiringTimeKeyFiles) else ()
    old = {file.path for file in files.files}
    outputs = [file for file in present if file.path not in old and file.compaction_generation]
    kept = {file.path for file in present}
    # By a subtask's own watermark, and its program's retention: a fork carries that of its source.
    later = [after, last.operator(operator.operator)]
    cutoff = max(_cutoff(owner, name, op) for owner in (operator, *later) for op in later)
    entries = set(files.files)
    # The same entry under another name: a copy was listed, or the name itself is damaged.
    renamed = {replace(file, path=_ANY) for file in present if file not in entries}
    for file in files.files:
        if file.path in kept or file.max_timestamp_micros < cutoff or _merged_into(file, outputs):
            continue
        if replace(file, path=_ANY) in renamed:
            continue
        if now.progress is None:
            yield file.path, ", neither expired nor merged: lost by a compaction or another run"
        else:
            yield file.path, ", though not expired; unless a merge left no row of it"


def _cutoff(
    owner: OperatorCheckpoint | None, name: TableName, at: OperatorCheckpoint | None
) -> int:
    """Return the cutoff by the watermark of `at` and the retention that `owner` says."""
    config = owner.configs[name].config if owner and name in owner.configs else None
    if at is None or not isinstance(config, ExpiringTimeKeyConfig):
        return 0
    return cutoff_micros(at.max_watermark_micros, config.retention_micros)


def _merged_into(file: TimeFile, outputs: Iterable[TimeFile]) -> bool:
    """Return whether `file` may be an input of one of the outputs: older, and of a lower level.

    A merged file has the epoch of its newest input. A file that a late message drops is newer.
    """
    return any(
        file.compaction_generation < output.compaction_generation and file.epoch <= output.epoch
        for output in outputs
    )


def _lost_pairs(
    after: OperatorCheckpoint, name: TableName, files: GlobalKeyedFiles, now: Checkpoint
) -> Iterator[tuple[StatePath, str]]:
    listed: TableFiles | None = after.tables.get(name)
    if listed is None:
        yield now.ref, ": the table is gone"
        return
    # Arroyo writes every pair at every epoch; managed jobs carry files forward until a merge.
    if now.progress is None:
        return
    earlier, kept = set(files.files), set(listed.paths)
    if any(is_compacted(path) and path not in earlier for path in listed.paths):
        return
    for place, path in enumerate(files.files):
        # A different name at its position, in no directory of this epoch, is reported elsewhere.
        # Whether the epoch itself wrote a file, judged by its directory.
        renamed = (
            other
            for other in listed.paths[place : place + 1]
            if other not in earlier and not other.startswith(f"{now.ref.parent}/")
        )
        if path not in kept and not any(renamed):
            yield path, ""


# ---- rows twice ----------------------------------------------------------------------------------


def _doubled_findings(last: Checkpoint) -> Iterator[Finding]:
    """Find inputs that are listed beside the output of their merge, in Arroyo jobs.

    Arroyo merges all files of level 0 at once. Managed jobs merge only some of them, and never
    adopt a merge in part."""
    if last.progress is not None:
        return
    for operator in last.operators:
        for name, files in operator.tables.items():
            listed = files.files if isinstance(files, ExpiringTimeKeyFiles) else ()
            outputs = [file for file in listed if file.compaction_generation]
            for file in listed:
                if file.compaction_generation == 0 and _merged_into(file, outputs):
                    evidence = (
                        f"listed by {operator.operator}.{name} beside the file it was merged "
                        "into: only some subtasks applied a compaction; its rows would be "
                        "loaded twice"
                    )
                    yield error("file-doubled", file.path, evidence, KEEP_AND_REPORT)


# ---- names used again ----------------------------------------------------------------------------


def _reused_findings(history: Sequence[Checkpoint]) -> Iterator[Finding]:
    """Find files that the newest epoch and an older one list, but not every epoch between.

    After a restart that ignored the state, file names are used again. A cleanup of the older epoch
    then deletes them.
    """
    if history[-1].worker_generation is not None or history[-1].progress is not None:
        return
    last = set(history[-1].paths)
    for place, older in enumerate(history[:-2]):
        # A cleanup keeps the files that a later epoch lists.
        between = history[place + 1 : -1]
        gone = {path for epoch in between for path in set(older.paths) & last - set(epoch.paths)}
        if gone:
            evidence = (
                f"epochs {older.epoch} and {history[-1].epoch} list it, one between them does not: "
                f"its name was used again; Arroyo's cleanup of epoch {older.epoch} deletes it "
                f"({len(gone)} such files)"
            )
            step = f"delete the metadata of the operators of epoch {older.epoch}, the job stopped"
            yield warning("name-reused", min(gone), evidence, step)
            return


# ---- merges that were not adopted ----------------------------------------------------------------


def waiting_findings(
    records: Mapping[StatePath, CompactionRecord | None],
    present: Mapping[StatePath, int],
    listed: Iterable[StatePath],
) -> Iterator[Finding]:
    """Find compactions that no run can adopt.

    Args:
        records: the records that wait for the job's writer, by path; None if one does not decode.
        present: sizes of the existing files.
        listed: the files that the newest epoch lists.
    """
    paths = set(listed)
    step = "delete the record and compact again; the job continues without it"
    for path, record in records.items():
        if record is None:
            evidence = "does not decode, or names another job's files: no run adopts it"
            yield warning("compaction-unreadable", path, evidence, step)
            continue
        outputs = [output for merged in record.merged for output in merged.output_paths]
        gone = [output for output in outputs if output not in present]
        # A merge is adopted as a whole, but not each of a record.
        adopted = [merge for merge in record.merged if not paths.isdisjoint(merge.output_paths)]
        both = sorted(path for merged in adopted for path in merged.input_paths if path in paths)
        if gone:
            evidence = f"{len(gone)} of {len(outputs)} merged files are missing, such as {gone[0]}"
            yield warning("compaction-outputs-gone", path, evidence, step)
        elif both:
            evidence = (
                f"listed beside the file it was merged into by {path}; its rows would be loaded "
                "twice"
            )
            yield error("file-doubled", both[0], evidence, KEEP_AND_REPORT)


# ---- how far sources have read, from one epoch to the next ---------------------------------------

Positions = Mapping[tuple[str, str, str], int]
"""By operator, table and partition: an offset, or a number of records, lines or events."""

_LARGEST = 2**63 - 1
_A_SECOND = 10**10
"""No source reads so many records, or bytes, of one partition in a second."""
_STEP = (
    "compare it with the source and with `arroyo-state sql @offsets JOB`; restore the file from "
    "a backup, or set the position with `arroyo-state edit offsets`"
)


def absurd_positions(now: Checkpoint, positions: Positions) -> Iterator[Finding]:
    """Find positions that no source can have."""
    for key, position in positions.items():
        if not 0 <= position <= _LARGEST:
            evidence = f"{_named(key)} is read to {position}; expected 0 to 2^63 - 1"
            yield error("position-absurd", now.ref, evidence, _STEP)


def position_steps(
    before: Checkpoint, now: Checkpoint, old: Positions, new: Positions
) -> Iterator[Finding]:
    """Find positions that go backwards, or further ahead than a source can read.

    Args:
        before, old: the epoch that `now` goes on from, and its positions.
        now, new: an epoch that no edit, rollback or start without state has set.
    """
    micros = max(1_000_000, now.finish_time_micros - before.finish_time_micros)
    most = _A_SECOND * micros // 1_000_000
    for key, position in new.items():
        if key not in old or not 0 <= position <= _LARGEST:
            continue
        step = f"{_named(key)} was read to {old[key]} at epoch {before.epoch}"
        if position < old[key]:
            evidence = f"{step}, and only to {position} at {now.epoch}: its rows come again"
            yield warning("position-backwards", now.ref, evidence, _STEP)
        elif position - old[key] > most:
            evidence = f"{step}, and to {position} at {now.epoch}, which no source can reach"
            yield warning("position-absurd", now.ref, evidence, _STEP)


def _named(key: tuple[str, str, str]) -> str:
    operator, _, partition = key
    return f"partition {partition} of {operator}"
