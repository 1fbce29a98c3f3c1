"""Pipelines with their user code, packed for Spark's workers."""

from __future__ import annotations

import hashlib
import pickle
from dataclasses import dataclass

from arroyo_dagster.engine.pipeline import Pipeline
from arroyo_dagster.errors import InputError
from arroyo_dagster.spark.packing import pickled, user_code_by_value

_REMEMBERED_PIPELINES = 64
_PIPELINES: dict[str, Pipeline] = {}


@dataclass(frozen=True, slots=True)
class PackedPipeline:
    """A pipeline with its user code, pickled once per run and unpickled once per process."""

    data: bytes
    digest: str

    @classmethod
    def pack(cls, pipeline: Pipeline) -> PackedPipeline:
        """Pickle a pipeline, including the code of modules that are not installed.

        Raises:
            InputError: a part of it cannot be pickled.
        """
        try:
            with user_code_by_value():
                data = pickled(pipeline)
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            raise InputError(
                f"the pipeline cannot be sent to Spark's workers ({error})",
                pipeline=pipeline.name,
                next_step="open files, connections and locks in on_start, not earlier",
            ) from error
        return cls(data, hashlib.sha256(data).hexdigest())

    def unpack(self) -> Pipeline:
        """Return the pipeline; in one process, repeated calls return the same object."""
        pipeline = _PIPELINES.pop(self.digest, None) or pickle.loads(self.data)
        _PIPELINES[self.digest] = pipeline  # keeps the order of use, oldest first
        while len(_PIPELINES) > _REMEMBERED_PIPELINES:
            del _PIPELINES[next(iter(_PIPELINES))]
        return pipeline
