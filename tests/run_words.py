"""Run the pipeline of `words.py` in a process of its own, to be killed by a test.

python -m tests.run_words FOLDER SEED in-process|fewer-epochs|few-epochs|spark [URL]
"""

from __future__ import annotations

import sys

from arroyo_dagster.engine import Pipeline, run_pipeline
from arroyo_dagster.state import open_store
from tests.words import random_words, words_pipeline

ROWS = 1200
ROWS_PER_EPOCH = {"in-process": 12, "fewer-epochs": 30, "few-epochs": 60, "spark": 60}


def pipeline_in(folder: str, seed: int, where: str) -> Pipeline:
    """The pipeline that the process runs."""
    rows = random_words(ROWS, seed)
    per_epoch = ROWS_PER_EPOCH[where]
    return words_pipeline(rows, f"file://{folder}/output", rows_per_epoch=per_epoch)


def main(folder: str, seed: int, where: str, url: str | None = None) -> None:
    """Run it to the end, with its state at a URL; beside its output unless given."""
    pipeline = pipeline_in(folder, seed, where)
    store = open_store(url or f"file://{folder}/state")
    if where != "spark":
        run_pipeline(pipeline, store)
        return
    from arroyo_dagster.spark.engine import pipeline as on_spark
    from arroyo_dagster.spark.settings import SparkSettings

    on_spark.run_pipeline(
        pipeline, store, on_spark.SparkOptions(spark=SparkSettings(master="local[2]"))
    )


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:])
