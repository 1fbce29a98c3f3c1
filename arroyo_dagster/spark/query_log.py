"""The identity of a streaming query and of its batches, from the log at its checkpoint location."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def query_id(session: SparkSession, location: str) -> str:
    """Return the id of the query at a checkpoint location; it is the same after restarts."""
    return str(json.loads(_read_text(session, f"{location}/metadata"))["id"])


def batch_digest(session: SparkSession, location: str, batch: int) -> str:
    """Return a digest of the offsets of a batch; the batch has others if another log planned it."""
    planned = _read_text(session, f"{location}/offsets/{batch}")
    return hashlib.sha256(planned.encode()).hexdigest()[:16]


def _read_text(session: SparkSession, path: str) -> str:
    jvm: Any = session.sparkContext._jvm
    hadoop = jvm.org.apache.hadoop.fs.Path(path)
    files = hadoop.getFileSystem(session.sparkContext._jsc.hadoopConfiguration())
    stream = files.open(hadoop)
    try:
        return str(jvm.org.apache.commons.io.IOUtils.toString(stream, "UTF-8"))
    finally:
        stream.close()
