"""The programs of bytewax, and of a plain loop; run by an interpreter that may lack this package.

`PYTHON stream_bytewax.py bytewax|loop WORK FOLDER OUTPUT SECONDS` prints the seconds of the work
and how many batches it reached.
"""

import itertools
import json
import sys
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.compute
import pyarrow.parquet as pq

GAP_MILLIS = 1_800_055
TOTALS = ("key", "total")
SESSIONS = ("key", "first", "last", "rows", "cents")


class Total:
    """The count or the sum of one key."""

    def __init__(self, work, state=None):
        self.counts, self.total = work == "count", state or 0

    def add(self, key, millis, cents):
        self.total += 1 if self.counts else cents

    def now(self, key):
        return (key, self.total)

    def end(self, key):
        return None

    @property
    def state(self):
        return self.total


class Session:
    """The open session of one key."""

    def __init__(self, work, state=None):
        self.state = state

    def add(self, key, millis, cents):
        state = self.state
        if state is not None and millis - state[1] <= GAP_MILLIS:
            self.state = (state[0], millis, state[2] + 1, state[3] + cents)
            return None
        self.state = (millis, millis, 1, cents)
        return None if state is None else (key, *state)

    def now(self, key):
        return None

    def end(self, key):
        return (key, *self.state)


def batches(folder, until):
    """Yield the rows of each batch as tuples, until the time is over."""
    for path in sorted(Path(folder, "parts").iterdir()):
        if time.perf_counter() > until:
            return
        table = pq.read_table(path)
        millis = pa.compute.divide(table["at"].cast(pa.int64()), 1000).to_pylist()
        columns = (table["key"].to_pylist(), millis, table["cents"].to_pylist())
        yield list(zip(*columns, strict=True))


def write(output, number, rows, names):
    columns = list(zip(*rows, strict=True)) or [[] for _ in names]
    pq.write_table(
        pa.table(dict(zip(names, columns, strict=True))), f"{output}/{number:05}.parquet"
    )


def loop(work, folder, output, until):
    """One dictionary and one loop; nothing survives the process."""
    kind = Session if work == "sessions" else Total
    names = SESSIONS if work == "sessions" else TOTALS
    known, count = {}, 0
    for count, rows in enumerate(batches(folder, until), 1):
        found, touched = [], {}
        for key, millis, cents in rows:
            logic = known.get(key)
            if logic is None:
                logic = known[key] = kind(work)
            ended = logic.add(key, millis, cents)
            if ended is not None:
                found.append(ended)
            touched[key] = logic
        found += [now for key, logic in touched.items() if (now := logic.now(key)) is not None]
        write(output, count, found, names)
    write(
        output, 0, [end for key, one in known.items() if (end := one.end(key)) is not None], names
    )
    return count


def bytewax(work, folder, output, until):
    """`stateful_batch`, with recovery: SQLite stores what has changed every ten seconds."""
    import bytewax.operators as op
    from bytewax.dataflow import Dataflow
    from bytewax.inputs import FixedPartitionedSource, StatefulSourcePartition
    from bytewax.outputs import DynamicSink, StatelessSinkPartition
    from bytewax.recovery import RecoveryConfig, init_db_dir
    from bytewax.testing import run_main

    reached = [0]
    numbers = itertools.count()
    kind = Session if work == "sessions" else Total
    names = SESSIONS if work == "sessions" else TOTALS

    class Part(StatefulSourcePartition):
        def __init__(self):
            self.rows = batches(folder, until)

        def next_batch(self):
            rows = next(self.rows)
            reached[0] += 1
            return [(key, (millis, cents)) for key, millis, cents in rows]

        def snapshot(self):
            return reached[0]

    class Source(FixedPartitionedSource):
        def list_parts(self):
            return ["rows"]

        def build_part(self, step_id, for_part, resume_state):
            return Part()

    class Logic(op.StatefulBatchLogic):
        def __init__(self, key, state):
            self.key, self.logic = key, kind(work, state)

        def on_batch(self, values):
            found = [self.logic.add(self.key, *value) for value in values]
            found.append(self.logic.now(self.key))
            return [one for one in found if one is not None], False

        def on_eof(self):
            end = self.logic.end(self.key)
            return [] if end is None else [end], False

        def snapshot(self):
            return self.logic.state

    class Out(StatelessSinkPartition):
        def write_batch(self, items):
            write(output, next(numbers), items, names)

    class Sink(DynamicSink):
        def build(self, step_id, worker_index, worker_count):
            return Out()

    # The builder gets the state of one key, not the key, so values carry it.
    flow = Dataflow("stream")
    rows = op.input("rows", flow, Source())
    keyed = op.map("carry", rows, lambda row: (row[0], (row[0], *row[1])))

    class Keyed(Logic):
        def __init__(self, state):
            super().__init__(None, state)

        def on_batch(self, values):
            self.key = values[0][0]
            return super().on_batch([value[1:] for value in values])

    stateful = op.stateful_batch("keyed", keyed, Keyed)
    op.output("out", op.key_rm("plain", stateful), Sink())
    database = Path(output).with_name(f"{Path(output).name}-recovery")
    database.mkdir()
    init_db_dir(database, 1)
    run_main(flow, recovery_config=RecoveryConfig(database))
    return reached[0]


if __name__ == "__main__":
    _, peer, work, folder, output, seconds = sys.argv
    begun = time.perf_counter()
    done = {"bytewax": bytewax, "loop": loop}[peer](work, folder, output, begun + float(seconds))
    print(json.dumps({"seconds": time.perf_counter() - begun, "batches": done}))
