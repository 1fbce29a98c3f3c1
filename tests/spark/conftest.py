"""One Spark session for all tests that need a JVM."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from arroyo_dagster.spark import session as spark_session


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.spark)


@pytest.fixture(scope="session")
def session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    warehouse = str(tmp_path_factory.mktemp("warehouse"))
    spark, managed = spark_session.get_session("local[2]", {"spark.sql.warehouse.dir": warehouse})
    yield spark
    if managed:
        spark.stop()
