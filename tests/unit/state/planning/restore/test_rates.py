"""How long a restore takes: the slowest subtask decides."""

from __future__ import annotations

from dataclasses import replace

import pytest

from arroyo_dagster.state.model.compaction import MEBIBYTE, Forecast
from arroyo_dagster.state.planning.restore.rates import RestoreRates

RATES = RestoreRates(start_micros=0, file_micros=1_000_000, bytes_a_second=MEBIBYTE)


def test_the_slowest_subtask_decides_how_long_a_restore_takes() -> None:
    forecast = Forecast(files=9, opens=(1, 5, 3), read_bytes=(8 * MEBIBYTE, MEBIBYTE, MEBIBYTE))
    assert RATES.restore_seconds(forecast) == pytest.approx(9)
    assert RATES.restore_seconds(Forecast()) == 0
    managed = replace(RATES, start_micros=2_000_000, managed_file_micros=0).of_job(managed=True)
    assert managed.restore_seconds(forecast) == pytest.approx(10)
    assert RATES.of_job(managed=False) is RATES
