"""Health checks of the bytes of a job's epochs: read, written, stored and pinned.

Each function returns its findings, or why the facts do not suffice for a judgement.
"""

from __future__ import annotations

from statistics import median

from arroyo_dagster.state.model.health import HealthLimits
from arroyo_dagster.state.model.ids import StatePath
from arroyo_dagster.state.model.tables import TableKind
from arroyo_dagster.state.model.units import format_bytes, format_micros
from arroyo_dagster.state.planning.health_checks.facts import (
    NO_EPOCH,
    NO_FILES,
    Found,
    HealthFacts,
    missing_evidence,
)
from arroyo_dagster.state.planning.restore.reads import restore_plan
from arroyo_dagster.state.planning.verify.findings import warning


def journal_complete(facts: HealthFacts, limits: HealthLimits) -> Found:
    """Find runs of gc whose record is missing, was changed, or cannot be read."""
    return list(facts.journal)


def reads_once(facts: HealthFacts, limits: HealthLimits) -> Found:
    """Find expiring tables whose bytes are read by many subtasks in a restore."""
    if facts.checkpoint is None or not facts.files:
        return NO_FILES
    sizes = facts.sizes
    opened: dict[tuple[str, str], int] = {}
    listed: dict[tuple[str, str], set[StatePath]] = {}
    for read in restore_plan(facts.checkpoint, sizes=sizes).reads:
        if read.kind is TableKind.EXPIRING_TIME_KEY:
            key = (str(read.operator), str(read.table))
            opened[key] = opened.get(key, 0) + read.size_bytes
            listed.setdefault(key, set()).update(read.files)
    findings = []
    for (operator, table), size in opened.items():
        once = sum(sizes.get(path, 0) for path in listed[operator, table])
        if once >= limits.small_table_bytes and size > limits.read_amplification * once:
            evidence = (
                f"a restore reads {format_bytes(size)} of table {operator}.{table}, which has "
                f"{format_bytes(once)}: its files overlap the key ranges of many subtasks"
            )
            step = "compact the job: outputs do not cross the key ranges of its subtasks"
            findings.append(warning("read-amplification", facts.job, evidence, step))
    return findings


def writes_changes_only(facts: HealthFacts, limits: HealthLimits) -> Found:
    """Find a job that writes most of its state again with every epoch."""
    shares = [
        (epoch, epoch.new_size_bytes / epoch.size_bytes)
        for epoch in facts.epochs
        if epoch.new_size_bytes is not None and epoch.size_bytes
    ]
    if reason := missing_evidence([epoch for epoch, _ in shares]):
        return reason
    newest = facts.newest
    if newest is None or newest.size_bytes is None:
        return NO_EPOCH
    share = median(share for _, share in shares)
    if newest.size_bytes < limits.small_table_bytes or 100 * share <= limits.write_percent:
        return []
    evidence = (
        f"each epoch writes {share:.0%} of the state of {format_bytes(newest.size_bytes)} again"
    )
    step = "checkpoint less often, or keep less in global keyed tables: these are written in full"
    return [warning("write-amplification", facts.job, evidence, step)]


def stores_little_more(facts: HealthFacts, limits: HealthLimits) -> Found:
    """Find a job that stores many times the bytes of its newest epoch."""
    newest = facts.newest
    if newest is None or not newest.size_bytes:
        return NO_FILES
    if (
        facts.stored_bytes < limits.small_table_bytes
        or facts.stored_bytes <= limits.space_amplification * newest.size_bytes
    ):
        return []
    evidence = (
        f"its {len(facts.present)} epochs store {format_bytes(facts.stored_bytes)}; the newest one "
        f"lists {format_bytes(newest.size_bytes)}"
    )
    step = "keep fewer epochs: `arroyo-state gc plan expire` shows what would be freed"
    return [warning("space-amplification", facts.job, evidence, step)]


def epochs_expire(facts: HealthFacts, limits: HealthLimits) -> Found:
    """Find a job whose old epochs are never expired."""
    if not facts.age.epochs:
        return NO_EPOCH
    unpinned = facts.age.epochs - len(facts.pins.pinned)
    if unpinned <= limits.epochs:
        return []
    evidence = f"has {unpinned} unpinned epochs; expected at most {limits.epochs}"
    step = "turn on the schedule of gc with `delete: true`, or run `arroyo-state gc run expire`"
    return [warning("gc-behind", facts.job, evidence, step)]


def pins_small(facts: HealthFacts, limits: HealthLimits) -> Found:
    """Find pins that are old, and pins or quarantines that keep much that no other epoch needs."""
    findings = []
    if facts.quarantined_bytes > limits.pinned_bytes:
        evidence = f"{format_bytes(facts.quarantined_bytes)} are in quarantine"
        step = "nothing, if gc of orphans runs: it purges them after 7 days. Else purge what is no "
        step += "longer needed: `arroyo-state gc purge JOB --yes`"
        findings.append(warning("pins-large", facts.job, evidence, step))
    if facts.pinned_bytes > limits.pinned_bytes:
        evidence = f"{format_bytes(facts.pinned_bytes)} are listed by pinned epochs only"
        step = "unpin what is no longer needed: `arroyo-state sql @pins JOB` lists them"
        findings.append(warning("pins-large", facts.job, evidence, step))
    for pin in facts.pins.pins:
        age = facts.now_micros - pin.pinned_at_micros
        if not pin.released and age > limits.pin_micros:
            evidence = f"epoch {pin.epoch} was pinned {format_micros(age)} ago by {pin.owner}" + (
                f": {pin.reason}" if pin.reason else ""
            )
            step = f"unpin it if it is no longer needed: `arroyo-state unpin JOB {pin.epoch}`"
            findings.append(warning("pin-old", facts.job, evidence, step))
    return findings
