"""What the processes of terminated runs are forked from: all of it imported, the jobs built."""

from arroyo_dagster.state.local import collecting, compaction, verify
from tests.orchestration.terminating import arroyo_compaction, arroyo_gc

assert collecting
assert compaction
assert verify
arroyo_compaction()
arroyo_gc()
