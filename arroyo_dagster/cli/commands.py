"""The commands of `arroyo-state`: the module and the first sentence of each.

`--help` prints these sentences, so that it loads no command. A test compares them with the help of
the commands.
"""

from __future__ import annotations

from collections.abc import Mapping

from arroyo_dagster.cli.lazy import LazyCommand

SECTIONS: Mapping[str, tuple[str, ...]] = {
    "Look": ("jobs", "epochs", "show", "rows", "get", "sql", "diff", "find-key"),
    "Check": ("verify", "health", "doctor"),
    "Maintain": ("compact", "gc", "pin", "unpin", "lease"),
    "Change": (*("edit", "fork", "evolve", "bootstrap", "copy", "rebuild", "rollback", "undo"),),
    "Run": ("run", "stop", "export"),
    "SDF": ("sdf",),
}
"""The sections of `--help`: what a person wants to do, and the commands for it."""

MAIN: Mapping[str, LazyCommand] = {
    "bootstrap": LazyCommand(
        "surgery.bootstrap",
        "Fill a stopped Arroyo job with tables that Spark computes from stored events.",
    ),
    "compact": LazyCommand("compaction.group", "Merge small files.", is_group=True),
    "completion": LazyCommand(
        "completion", "Print the script that completes commands and options in a shell."
    ),
    "copy": LazyCommand(
        "surgery.copy", "Copy a whole job, or one epoch of it, to another checkpoint URL."
    ),
    "diff": LazyCommand(
        "query.diff",
        "Print what changed between two epochs: inserted, updated, removed and expired rows.",
    ),
    "doctor": LazyCommand(
        "doctor", "Check this machine and the store; with JOB, print what is wrong with a job."
    ),
    "edit": LazyCommand(
        "surgery.group",
        "Change the state of a stopped job: offsets, watermark, keys, old rows, entries.",
        is_group=True,
    ),
    "epochs": LazyCommand(
        "inspect", "List the epochs of a job, oldest first, with the state of each."
    ),
    "export": LazyCommand(
        "query.export",
        "Export a table to Parquet files, Delta or Iceberg: one epoch or several.",
    ),
    "evolve": LazyCommand(
        "surgery.evolve", "Give a stopped Arroyo job the state of another job whose SQL differs."
    ),
    "find-key": LazyCommand(
        "surgery.find_key",
        "Find the rows of one key in all that a job stores: epochs, unlisted files, quarantine.",
    ),
    "fork": LazyCommand(
        "surgery.fork", "Give a stopped Arroyo job the state of another job of the same SQL."
    ),
    "gc": LazyCommand(
        "gc.group", "Delete unreferenced state: expired epochs, orphans, dead jobs.", is_group=True
    ),
    "get": LazyCommand(
        "query.get",
        "Look up the rows of one key: only the files and row groups that may hold it are read.",
    ),
    "health": LazyCommand("health", "Find jobs that are damaged, late, growing or fragmented."),
    "jobs": LazyCommand("inspect", "List the jobs below the checkpoint URL."),
    "lease": LazyCommand("leases", "End the lease of a process that hangs.", is_group=True),
    "pin": LazyCommand(
        "pins", "Keep an epoch until it is unpinned, and check that it is restorable."
    ),
    "rebuild": LazyCommand(
        "surgery.rebuild",
        "Write lost or damaged metadata of a stopped Arroyo job anew, from its data files.",
    ),
    "rollback": LazyCommand("surgery.rollback", "Take a job back to an older epoch."),
    "rows": LazyCommand(
        "show", "Print the decoded rows of a table, as a restore of the epoch would load them."
    ),
    "run": LazyCommand("run", "Run a pipeline from its newest checkpoint.", runs_user_code=True),
    "sdf": LazyCommand(
        "sdf.group",
        "SDF keyed states: declared in YAML, written by one service, read by others.",
        is_group=True,
    ),
    "show": LazyCommand(
        "show",
        "Print a job: operators, tables, positions, watermarks, lease, pins, size, cost of a "
        "restore.",
    ),
    "sql": LazyCommand("query.sql", "Query any table of any job at any epoch."),
    "stop": LazyCommand("run", "Ask a running managed job to stop with a checkpoint."),
    "unpin": LazyCommand("pins", "Let an epoch expire with the others again."),
    "undo": LazyCommand(
        "surgery.undo",
        "Restore the state from before the last edit, in-place compaction or rebuild.",
    ),
    "verify": LazyCommand(
        "verify", "Check whether a job can be restored from an epoch, and print why not."
    ),
}

COMPACT: Mapping[str, LazyCommand] = {
    "plan": LazyCommand(
        "compaction.commands",
        "Print the planned merges of a job, and the reason for everything that is skipped.",
    ),
    "run": LazyCommand(
        "compaction.commands",
        "Merge files, verify that a restore loads the same rows, and publish the result.",
    ),
    "window": LazyCommand(
        "compaction.window",
        "Stop a running Arroyo job with a checkpoint, rewrite its state, start it again.",
    ),
}

EDIT: Mapping[str, LazyCommand] = {
    "delete-key": LazyCommand(
        "surgery.commands", "Delete the rows of one key from every table of a stopped job."
    ),
    "offsets": LazyCommand("surgery.commands", "Set where the sources of a stopped job continue."),
    "rescale": LazyCommand(
        "surgery.commands",
        "Split the state of a stopped Arroyo job for a start at another parallelism, with proof.",
    ),
    "retain": LazyCommand(
        "surgery.commands", "Drop rows of windows, sessions and joins that are older than a time."
    ),
    "set": LazyCommand("surgery.commands", "Replace the value of one entry of a table."),
    "watermark": LazyCommand(
        "surgery.commands", "Set the watermark of a stopped job, at every operator that has one."
    ),
}

GC: Mapping[str, LazyCommand] = {
    "explain": LazyCommand("gc.inspect", "Explain why an object stays or may be deleted."),
    "plan": LazyCommand("gc.commands", "Print what would be deleted."),
    "purge": LazyCommand(
        "gc.quarantine", "Permanently delete what has been in quarantine for long enough."
    ),
    "run": LazyCommand(
        "gc.commands",
        "Delete what a plan names: data, then records, then metadata, verified and journalled.",
    ),
    "undelete": LazyCommand("gc.quarantine", "Restore objects from quarantine, byte for byte."),
}

SDF: Mapping[str, LazyCommand] = {
    "check": LazyCommand(
        "sdf.check",
        "Check definitions of dataflows and packages; print each error with path, line and number.",
    ),
    "clean": LazyCommand(
        "sdf.clean", "Remove stored states of a dataflow, and read its topics again."
    ),
    "generate": LazyCommand(
        "sdf.generate",
        "Write a new dataflow or package with a state, a function and a test that passes.",
    ),
    "log": LazyCommand(
        "sdf.log",
        "List the last records on which steps of a dataflow failed, and messages of its functions.",
    ),
    "replay": LazyCommand(
        "sdf.replay",
        "Process the records again that failed in runs with `--on-error dead-letter`.",
        runs_user_code=True,
    ),
    "run": LazyCommand(
        "sdf.run",
        "Run the services of a dataflow, in process or on Spark, each from its newest checkpoint.",
        runs_user_code=True,
    ),
    "schema": LazyCommand("sdf.check", "Print the JSON Schema of a kind of file, for editors."),
    "show": LazyCommand(
        "sdf.inspect",
        "List the stored namespaces of a dataflow, or the rows of one; what a package has.",
    ),
    "sql": LazyCommand("sdf.inspect", "Query the arrow-row states of a dataflow."),
    "test": LazyCommand(
        "sdf.test",
        "Test a dataflow or a package: `sdf test [FILE]` runs the section `tests` of its YAML.",
        is_group=True,
    ),
}
