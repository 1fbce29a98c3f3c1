"""Refusal of jobs that were copied under another name: their metadata names the original's
objects.
"""

from __future__ import annotations

from collections.abc import Iterable

from arroyo_dagster.errors import ProtocolError
from arroyo_dagster.state.model.ids import StatePath
from arroyo_dagster.state.model.layout import JobPaths


def check_own(
    paths: JobPaths,
    what: str,
    named: Iterable[StatePath],
    *,
    next_step: str,
    below: StatePath | None = None,
    **facts: object,
) -> None:
    """Check that metadata of a job names objects of this job only.

    Args:
        what: what names them; the message begins with it.
        named: the objects that it names.
        below: the directory that must contain them; None = the job's own.
        facts: further facts of the error.

    Raises:
        ProtocolError: one of them lies elsewhere.
    """
    prefix = f"{below or paths.root}/"
    other = next((path for path in named if not path.startswith(prefix)), None)
    if other is not None:
        evidence: dict[str, object] = {"job": paths.root, "found": other, **facts}
        raise ProtocolError(
            f"{what} names objects of another job, from which this one was copied",
            next_step=next_step,
            **evidence,  # type: ignore[arg-type]
        )
