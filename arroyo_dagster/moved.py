"""The modules of release 0.1 under their old names, until release 0.3.

`import arroyo_dagster.state.local.jobs` returns the module that has its content now, and warns. The
old names of four modules are names of packages now and are not in the list:
`state.planning.compaction`, `state.planning.gc`, `state.codec.bincode` and `state.codec.hashing`.
The last two packages export the public names of the old modules.
"""

from __future__ import annotations

import importlib
import sys
import types
import warnings
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from typing import Any

# Current package: its modules as "old" if the last name is unchanged, otherwise as "old=new".
_MOVED = {
    "dataflow": "state.local.dataflow=in_process state.sdf.faults=errors",
    "dataflow.definition": (
        "state.sdf.bodies state.sdf.checking state.sdf.core_schema state.sdf.definition "
        "state.sdf.dumping state.sdf.durations state.sdf.emitting state.sdf.grammar "
        "state.sdf.json_schema state.sdf.legacy state.sdf.linking state.sdf.loading "
        "state.sdf.mistakes=diagnostics state.sdf.names state.sdf.packages state.sdf.reading "
        "state.sdf.reading_rows state.sdf.reading_services state.sdf.reading_states "
        "state.sdf.reading_types state.sdf.scope state.sdf.shapes state.sdf.types "
        "state.sdf.windows state.sdf.yaml_tree"
    ),
    "dataflow.runtime": (
        "state.sdf.builder=keyed_states state.sdf.carrying=record_batches state.sdf.context "
        "state.sdf.converters state.sdf.delivering=sink_operator state.sdf.event_time "
        "state.sdf.flushing=flush_operator state.sdf.functions state.sdf.handles "
        "state.sdf.operators state.sdf.readers state.sdf.records=records_operator "
        "state.sdf.restored=restore state.sdf.service state.sdf.service_source state.sdf.steps "
        "state.sdf.stores"
    ),
    "dataflow.storage": (
        "state.sdf.boundary state.sdf.engine_tables state.sdf.state_tables state.sdf.values"
    ),
    "dataflow.testing": (
        "state.local.dataflow_trial=in_process state.sdf.package_tests state.sdf.trials=runner"
    ),
    "dataflow.topics": (
        "state.sdf.topics.bindings state.sdf.topics.cells state.sdf.topics.files "
        "state.sdf.topics.folders state.sdf.topics.lines state.sdf.topics.pipe "
        "state.sdf.topics.rate state.sdf.topics.records state.sdf.topics.rows "
        "state.sdf.topics.segments state.sdf.topics.sinks state.sdf.topics.wiring"
    ),
    "dataflow.views": (
        "state.sdf.frames state.sdf.namespaces state.sdf.shown=rendering state.sdf.snapshots "
        "state.sdf.sql state.sdf.summary state.sdf.view"
    ),
    "spark": "spark.landing=staging spark.rewriting=rewrite",
    "spark.dataflow": "spark.pipelines spark.states spark.topics",
    "state.codec": "state.codec.collecting=gc state.model.control",
    "state.codec.bincode": (
        "state.codec.arrow_buffers state.codec.bincode_columns=columns "
        "state.codec.bincode_decoding=decoding state.codec.bincode_encoding=encoding "
        "state.codec.bincode_faults=errors state.codec.bincode_scalars=scalars "
        "state.codec.bincode_shapes=shapes state.codec.bincode_times=times"
    ),
    "state.codec.hashing": (
        "state.codec.ahash state.codec.ahash_aes state.codec.hashing_columns=columns "
        "state.codec.siphash"
    ),
    "state.metadata": (
        "state.backend state.backend_reader=reader state.interrupts state.lease state.lease_records"
    ),
    "state.model": (
        "state.model.collecting=garbage state.model.directory=job_facts "
        "state.model.rewriting=rewrite state.model.window=maintenance_window"
    ),
    "state.operations": "state.local.telling=progress",
    "state.operations.catalog": (
        "state.local.catalogue_owner=owner state.local.directory=job_directory "
        "state.local.fleet=changes state.local.hashes=hash_variant state.local.health=footers "
        "state.local.history=epochs state.local.jobs state.local.known_jobs state.local.leases "
        "state.local.query state.local.verdicts"
    ),
    "state.operations.compaction": (
        "state.local.compaction=job state.local.forecasts state.local.maintenance_window "
        "state.local.merges=execute state.local.rewriting=rewrite "
        "state.local.rewriting_publish=rewrite_publish "
        "state.local.rewriting_scene=rewrite_preconditions state.local.rewriting_undo=rewrite_undo"
    ),
    "state.operations.gc": (
        "state.local.collecting=execute state.local.collecting_steps=steps state.local.copies "
        "state.local.explain state.local.fate state.local.gc=expire state.local.gc_plans=plan "
        "state.local.journal state.local.journal_archive state.local.journal_chain "
        "state.local.journal_check state.local.quarantine state.local.retained=pins "
        "state.local.roots state.local.roots_legacy state.local.roots_protocol "
        "state.local.roots_read=root_reader state.local.roots_rolled_back state.local.roots_times "
        "state.local.survey=inventory state.local.undelete"
    ),
    "state.operations.restore": "state.local.rollback",
    "state.operations.verify": (
        "state.local.doctor=store state.local.verify=job state.local.verify_data=data "
        "state.local.verify_keys=keys state.local.verify_metadata=metadata "
        "state.local.verify_rows=rows state.local.verify_values=values"
    ),
    "state.planning.compaction": (
        "state.planning.budget state.planning.merge_parts=split state.planning.merged=apply "
        "state.planning.policies state.planning.rewriting=rewrite"
    ),
    "state.planning.gc": (
        "state.planning.collecting=recheck state.planning.dead_jobs state.planning.expiry "
        "state.planning.orphans state.planning.permission=safety_checks "
        "state.planning.reachable=reachability"
    ),
    "state.planning.restore": (
        "state.planning.checkpoint state.planning.collected=partially_collected "
        "state.planning.evolution=schema_evolution state.planning.lineage "
        "state.planning.query=reads state.planning.recovery "
        "state.planning.rollback state.planning.widening=type_widening"
    ),
    "state.planning.verify": (
        "state.planning.findings state.planning.fleet_health=fleet state.planning.health=checks "
        "state.planning.verify_epochs=epochs state.planning.verify_files=files "
        "state.planning.verify_legacy=legacy state.planning.verify_protocol=protocol "
        "state.planning.verify_records=records state.planning.verify_restore=restore"
    ),
    "state.runtime": (
        "state.connectors state.coordinator state.exchange state.local.loading "
        "state.local.pipeline=in_process state.operators state.pipeline state.task"
    ),
    "state.storage.arroyo": (
        "state.storage.arroyo_api=api state.storage.arroyo_postgres=postgres "
        "state.storage.arroyo_rows=rows state.storage.arroyo_sqlite=sqlite "
        "state.storage.database_copy state.storage.http_json"
    ),
    "state.storage.remote": (
        "state.storage.credentials state.storage.fsspec_options state.storage.fsspec_store "
        "state.storage.obstore_listing state.storage.obstore_options state.storage.obstore_store "
        "state.storage.open state.storage.options state.storage.s3_store "
        "state.storage.through_fsspec"
    ),
    "state.tables.known": (
        "state.tables.catalogue state.tables.known_operators=operators "
        "state.tables.known_sinks=sinks state.tables.known_sources=sources "
        "state.tables.known_tables=tables"
    ),
    "state.tables.merge": (
        "state.tables.merging=task state.tables.merging_pairs=pairs state.tables.merging_rows=rows "
        "state.tables.range_files state.tables.rewriting=rewrite"
    ),
}
_GONE = ("state.local", "state.sdf", "state.sdf.topics")
"""Packages that contain only moved modules."""


def moved_modules() -> dict[str, str]:
    """Return the current name of each module, by its old name."""
    found: dict[str, str] = {}
    for package, modules in _MOVED.items():
        for one in modules.split():
            old, _, name = one.partition("=")
            name = name or old.rpartition(".")[2]
            found[f"arroyo_dagster.{old}"] = f"arroyo_dagster.{package}.{name}"
    return found


class _Moved:
    """Finds modules by their old names.

    It is a finder and a loader without their base classes: importing `importlib.abc` would take a
    third of this package's import time.
    """

    def __init__(self) -> None:
        self._names = moved_modules()
        self._specs: dict[str, ModuleSpec | None] = {}

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: types.ModuleType | None = None,
    ) -> ModuleSpec | None:
        loader: Any = self  # duck-typed; the annotations of `ModuleSpec` require the base class
        if fullname.removeprefix("arroyo_dagster.") in _GONE:
            return ModuleSpec(fullname, loader, is_package=True)
        return ModuleSpec(fullname, loader) if fullname in self._names else None

    def create_module(self, spec: ModuleSpec) -> types.ModuleType | None:
        if spec.name not in self._names:
            return None
        name = self._names[spec.name]
        warnings.warn(
            f"{spec.name} is {name} now; the old name goes with release 0.3",
            DeprecationWarning,
            stacklevel=2,
        )
        module = importlib.import_module(name)
        self._specs[spec.name] = module.__spec__
        return module

    def exec_module(self, module: Any) -> None:
        old = module.__spec__.name
        if old in self._specs:  # the import system has replaced its spec by that of the old name
            module.__spec__ = self._specs[old]


def install() -> None:
    """Register the finder of the old names; it does not affect other imports."""
    if not any(isinstance(one, _Moved) for one in sys.meta_path):
        sys.meta_path.append(_Moved())
