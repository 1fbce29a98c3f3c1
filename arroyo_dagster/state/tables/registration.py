"""Checks whether the tables that an operator registers can continue from those of a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from arroyo_dagster.errors import InputError
from arroyo_dagster.state.codec.schema import memory_schema
from arroyo_dagster.state.model.checkpoints import OperatorCheckpoint
from arroyo_dagster.state.model.ids import Epoch, TableName
from arroyo_dagster.state.model.tables import ExpiringTimeKeyConfig, TableConfig, TableKind
from arroyo_dagster.state.model.types import Type, same_layout
from arroyo_dagster.state.planning.restore.schema_evolution import evolution, noted
from arroyo_dagster.state.tables.keyed_forms import KeyedForm


def as_stored(
    configs: Mapping[TableName, TableConfig], restored: OperatorCheckpoint | None
) -> dict[TableName, TableConfig]:
    """Return the configurations to store, with notes about the columns of older files of their
    tables.

    Args:
        configs: as the operator registers them; `check_tables` has accepted them.
        restored: the operator at the epoch to continue from.
    """
    stored_configs = dict(configs)
    for name, stored in (restored.configs if restored else {}).items():
        now = configs.get(name)
        before = stored.config
        if now is None or restored is None:
            continue
        if isinstance(before, ExpiringTimeKeyConfig) and isinstance(
            now.config, ExpiringTimeKeyConfig
        ):
            changed = noted(before, now.config, Epoch(restored.epoch + 1))
            stored_configs[name] = replace(now, config=changed)
    return stored_configs


def check_tables(configs: Mapping[TableName, TableConfig], restored: OperatorCheckpoint) -> None:
    """Refuse to restore an operator whose tables are not those of the checkpoint.

    Raises:
        InputError: a table of the checkpoint is not registered, or has changed its kind; a global
            keyed one has other types, or values of a newer version; an expiring one has columns as
            which its old rows cannot be read (`planning.restore.schema_evolution`).

    Source: crates/arroyo-state/src/tables/table_manager.rs: a missing table fails the start.
    Differs: Arroyo does not compare types and columns, and reads old files with the new ones.
    """
    for name, files in restored.tables.items():
        problem, next_step = _registration_error(name, configs.get(name), restored, files.kind)
        if problem is not None:
            raise InputError(
                problem,
                operator=restored.operator,
                table=name,
                registered=sorted(configs),
                next_step=next_step,
            )


def _registration_error(
    name: TableName, config: TableConfig | None, restored: OperatorCheckpoint, kind: TableKind
) -> tuple[str | None, str]:
    """Return why a table cannot continue and what to do; None if it can."""
    stored = restored.configs.get(name)
    if config is None:
        return (
            "the checkpoint has a table that the operator does not register",
            "register it again, or leave its state behind in the older epochs with "
            f"`run --allow-dropped {restored.operator}/{name}`",
        )
    kind = stored.kind if stored else kind
    if config.kind is not kind:
        return (
            f"the table was {kind.label} and is now registered as {config.kind.label}",
            "give the new table another name: state is not converted between kinds",
        )
    step = "restore the old registration, or give the new table another name"
    return None if stored is None else _changed(stored, config), step


def _changed(stored: TableConfig, config: TableConfig) -> str | None:
    """Return why the files of `stored` cannot be read as `config`; None if they can."""
    before, now = stored.config, config.config
    if isinstance(before, ExpiringTimeKeyConfig) and isinstance(now, ExpiringTimeKeyConfig):
        memory_schema(before)  # raises an error if the stored schema is broken
        forms = [KeyedForm.of(side) for side in (stored, config)]
        earlier, later = (form.value if form else "no keyed state" for form in forms)
        if earlier != later:
            return f"the table held {earlier}, and is now registered for {later}"
        changes = evolution(before, now)
        if changes.problems:
            return (
                "the columns of the table cannot be read with the current schema: "
                f"{changes.problems[0]}"
            )
        return None
    if stored.state_version > config.state_version:
        return (
            f"the table holds values of state version {stored.state_version}, and the operator "
            f"registers {config.state_version}"
        )
    if _differ(stored.key_type, config.key_type):
        return "the type of the table's keys does not match the checkpoint"
    if stored.state_version == config.state_version and _differ(
        stored.value_type, config.value_type
    ):
        return (
            "the type of the table's values does not match the checkpoint; a new type needs a "
            "new version and a migration (MigratableState)"
        )
    return None


def _differ(stored: Type | None, now: Type | None) -> bool:
    return stored is not None and now is not None and not same_layout(stored, now)
