"""How far sources and watermarks are over the epochs of a job, and what a restore would cost."""

from __future__ import annotations

import pytest

from arroyo_dagster.errors import InputError
from arroyo_dagster.state import StateCatalog, open_state
from arroyo_dagster.state.operations.query.advance import source_advance, watermark_advance
from arroyo_dagster.state.operations.query.restore_estimate import estimate_restore
from arroyo_dagster.state.planning.restore.reads import restore_plan
from tests.compat.arroyo import ARCHIVES, unpack
from tests.jobs import written_by_word_job


@pytest.fixture(scope="module", params=ARCHIVES)
def arroyo(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> StateCatalog:
    return open_state(unpack(request.param, tmp_path_factory.mktemp(request.param)))


def test_positions_of_a_real_arroyo_advance(arroyo: StateCatalog) -> None:
    for job in arroyo.jobs():
        found = source_advance(job)
        assert found, job.name
        for one in found:
            positions = [position for _, position in one.positions if position is not None]
            assert positions == sorted(positions)
            assert one.newest.connector.endswith("source")
            if one.advanced_at_micros is not None and positions[-1] > positions[0]:
                assert one.rate is not None
                assert one.rate > 0
        newest = job.epoch()
        for one in watermark_advance(job):
            operator = newest.checkpoint.operator(one.operator)
            assert operator is not None
            assert one.watermark_micros == operator.min_watermark_micros


def test_a_partition_that_stands_still_is_named() -> None:
    store = written_by_word_job(rows=24, keep_epochs=None)
    job = open_state(store).job("main")
    assert not any(one.stands_still for one in source_advance(job))
    last = source_advance(job, 1)
    assert [one.rate for one in last] == [None] * len(last)
    assert not any(one.stands_still for one in last)
    (one,) = source_advance(job, 3, {source_advance(job)[0].newest.partition: 1000})
    assert one.lag == 1000 - (one.newest.position or 0)
    with pytest.raises(InputError, match="no source has a partition"):
        source_advance(job, 3, {"nowhere": 1})
    with pytest.raises(InputError, match="one epoch or more"):
        watermark_advance(job, 0)


def test_a_restore_is_estimated_at_any_parallelism_and_retention(arroyo: StateCatalog) -> None:
    for job in arroyo.jobs():
        epoch = job.epoch()
        for parallelism in (None, 1, 5):
            found = estimate_restore(epoch, parallelism=parallelism)
            plan = restore_plan(epoch.checkpoint, parallelism)
            assert sum(one.opens for one in found.tables) == plan.opens
            assert sum(one.files for one in found.tables) == len(plan.files)
            assert found.seconds > 0
            for one in found.tables:
                assert 0 <= one.most_rows <= one.rows
        long = estimate_restore(epoch, retention_micros=10**18)
        none = estimate_restore(epoch, retention_micros=0)
        assert sum(one.rows for one in none.tables) <= sum(one.rows for one in long.tables)
        assert none.memory_bytes <= long.memory_bytes
    with pytest.raises(InputError, match="1 or more"):
        estimate_restore(epoch, parallelism=0)
