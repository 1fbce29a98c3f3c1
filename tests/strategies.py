"""Generators that several tests share."""

from __future__ import annotations

from hypothesis import strategies as st

from arroyo_dagster.state import (
    Epoch,
    JobId,
    OperatorCheckpoint,
    OperatorId,
    PipelineId,
    StatePath,
    TableConfig,
    TableName,
    WorkerGeneration,
)
from arroyo_dagster.state.model.checkpoints import (
    ExpiringTimeKeyReport,
    GlobalKeyedReport,
    Manifest,
    RunProgress,
    SubtaskCheckpoint,
)
from arroyo_dagster.state.model.ids import path_error
from arroyo_dagster.state.model.keys import MAX_ROUTING_KEY
from arroyo_dagster.state.model.tables import (
    ExpiringTimeKeyConfig,
    ExpiringTimeKeyFiles,
    GlobalKeyedConfig,
    GlobalKeyedFiles,
    StoredSchema,
    TimeFile,
)
from arroyo_dagster.state.model.types import STRING, Primitive

U32 = st.integers(0, 2**32 - 1)
U64 = st.integers(0, 2**64 - 1)
NAMES = st.text(st.characters(exclude_characters="/\\", exclude_categories=["Cs"]), min_size=1)
SEGMENTS = NAMES.filter(lambda name: name not in (".", ".."))
PATHS = (
    st.lists(st.from_regex(r"[a-z0-9_\-<>% ]{1,8}", fullmatch=True), min_size=1, max_size=5)
    .map("/".join)
    .filter(lambda text: path_error(text) is None)
    .map(StatePath)
)
EPOCHS = U32.map(Epoch)

TIME_FILES = st.builds(
    TimeFile,
    epoch=EPOCHS,
    path=PATHS,
    min_routing_key=st.integers(0, MAX_ROUTING_KEY),
    max_routing_key=st.integers(0, MAX_ROUTING_KEY),
    max_timestamp_micros=U64,
    compaction_generation=U64,
)
GLOBAL_CONFIGS = st.builds(
    TableConfig,
    config=st.builds(
        GlobalKeyedConfig,
        table=st.just(TableName("g")),
        description=st.text(),
        uses_two_phase_commit=st.booleans(),
    ),
    state_version=U32,
    key_type=st.sampled_from([None, STRING]),
    value_type=st.sampled_from([None, Primitive("i64")]),
)
EXPIRING_CONFIGS = st.builds(
    TableConfig,
    config=st.builds(
        ExpiringTimeKeyConfig,
        table=st.just(TableName("t")),
        description=st.text(),
        retention_micros=U64,
        generational=st.booleans(),
        schema=st.builds(
            StoredSchema,
            arrow_schema=st.text(),
            timestamp_index=U32,
            key_indices=st.none() | st.lists(U32, max_size=3).map(tuple),
            routing_key_indices=st.none() | st.lists(U32, max_size=3).map(tuple),
        ),
    ),
)
GLOBAL_FILES = st.builds(
    GlobalKeyedFiles,
    files=st.lists(PATHS, max_size=3, unique=True).map(tuple),
    commit_data_by_subtask=st.dictionaries(st.integers(0, 9), st.binary(max_size=4), max_size=3),
)
EXPIRING_FILES = st.builds(ExpiringTimeKeyFiles, files=st.lists(TIME_FILES, max_size=3).map(tuple))
GLOBAL_REPORTS = st.builds(
    GlobalKeyedReport,
    file=st.none() | PATHS,
    removals=st.none() | PATHS,
    commit_data=st.none() | st.binary(max_size=4),
)
EXPIRING_REPORTS = st.builds(
    ExpiringTimeKeyReport,
    watermark_micros=st.none() | U64,
    files=st.lists(TIME_FILES, max_size=3).map(tuple),
)
_BOTH_CONFIGS = st.fixed_dictionaries({"g": GLOBAL_CONFIGS, "t": EXPIRING_CONFIGS})
SUBTASKS = st.builds(
    SubtaskCheckpoint,
    subtask_index=U32,
    start_time_micros=U64,
    finish_time_micros=U64,
    watermark_micros=st.none() | U64,
    size_bytes=U64,
    tables=st.fixed_dictionaries({"g": GLOBAL_REPORTS, "t": EXPIRING_REPORTS}),
    configs=_BOTH_CONFIGS,
)
OPERATORS = st.builds(
    OperatorCheckpoint,
    job=NAMES.map(JobId),
    operator=NAMES.map(OperatorId),
    epoch=EPOCHS,
    parallelism=U64,
    min_watermark_micros=st.none() | U64,
    max_watermark_micros=st.none() | U64,
    start_time_micros=U64,
    finish_time_micros=U64,
    tables=st.fixed_dictionaries({"g": GLOBAL_FILES, "t": EXPIRING_FILES}),
    configs=_BOTH_CONFIGS,
    subtask=st.none() | SUBTASKS,
)
MANIFESTS = st.builds(
    Manifest,
    pipeline=NAMES.map(PipelineId),
    job=NAMES.map(JobId),
    worker_generation=U64.map(WorkerGeneration),
    epoch=U64.map(Epoch),
    min_epoch=U64.map(Epoch),
    start_time_micros=U64,
    finish_time_micros=U64,
    needs_commit=st.booleans(),
    operators=st.lists(OPERATORS, max_size=2).map(tuple),
    parent_ref=st.none() | PATHS,
    progress=st.none()
    | st.builds(
        RunProgress,
        offsets=st.text(),
        final=st.booleans(),
        exhausted=st.booleans(),
        rolled_back_to=st.none() | U64.map(Epoch),
    ),
)
