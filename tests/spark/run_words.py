"""Run the pipeline of `words.py` on Spark in a process of its own, to be killed by a test.

    python -m tests.spark.run_words FOLDER SEED
"""

from __future__ import annotations

import sys

from arroyo_dagster.spark.pipeline import run_pipeline
from arroyo_dagster.spark.session import LOG_SETTINGS
from arroyo_dagster.state.pipeline import Pipeline
from arroyo_dagster.state.storage.open import open_store
from tests.spark.conftest import QUICK_JVM
from tests.spark.words import random_words, words_pipeline

ROWS = 1200
ROWS_PER_EPOCH = 60


def pipeline_in(folder: str, seed: int) -> Pipeline:
    """The pipeline that the process runs."""
    rows = random_words(ROWS, seed)
    return words_pipeline(rows, f"file://{folder}/output", rows_per_epoch=ROWS_PER_EPOCH)


if __name__ == "__main__":
    run_pipeline(
        pipeline_in(sys.argv[1], int(sys.argv[2])),
        open_store(f"file://{sys.argv[1]}/state"),
        master="local[2]",
        conf={
            "spark.driver.extraJavaOptions": f"{QUICK_JVM} -Dlog4j2.configurationFile={LOG_SETTINGS}"
        },
    )
