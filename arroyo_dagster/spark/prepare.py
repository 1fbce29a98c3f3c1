"""Prepare a machine or an image: write the archive with which local Spark sessions start fast.

python -m arroyo_dagster.spark.prepare
"""

from __future__ import annotations

from arroyo_dagster.errors import ArroyoStateError
from arroyo_dagster.spark.fast_start import is_complete
from arroyo_dagster.spark.session import JAVA_STEP, get_session, local_archive, local_java


def main() -> None:
    """Run what every session of this package runs, and let the JVM write the archive."""
    problem = local_java().problem
    if problem is not None:
        raise SystemExit(f"{problem}. Next: {JAVA_STEP}")
    try:
        _write_archive()
    except ArroyoStateError as error:
        raise SystemExit(str(error)) from error


def _write_archive() -> None:
    archive = local_archive()
    if is_complete(archive):
        print(f"{archive} is there: local Spark sessions start fast")
        return
    archive.parent.mkdir(parents=True, exist_ok=True)
    archive.touch()
    session, _ = get_session("local[1]")
    session.range(0, 8, 1, 2).mapInArrow(lambda batches: batches, "id long").collect()
    session.sparkContext.parallelize(range(2), 2).map(str).collect()
    jvm = getattr(session.sparkContext._gateway, "proc", None)
    session.stop()
    if jvm is not None:
        jvm.stdin.close()  # the JVM ends, and writes the archive
        jvm.wait()
    if not is_complete(archive):
        raise SystemExit(f"{archive} was not written; local Spark sessions start without it")
    print(f"{archive} is written: local Spark sessions start fast from now on")


if __name__ == "__main__":
    main()
