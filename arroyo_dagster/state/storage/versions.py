"""Whether a store keeps older versions of objects that are replaced or deleted."""

from __future__ import annotations

from arroyo_dagster.errors import StorageError
from arroyo_dagster.state.storage.local_disk import local_disk
from arroyo_dagster.state.storage.store import ObjectStore


def keeps_versions(store: ObjectStore) -> tuple[bool | None, str]:
    """Return whether a store keeps older versions, and a sentence about it.

    None: the store cannot be asked, for example because the credentials have no right to.
    """
    if local_disk(store) is not None:
        return False, "local disk keeps no versions"
    ask = getattr(store, "keeps_versions", None)
    inner: object = store
    while ask is None and (inner := getattr(inner, "inner", None)) is not None:
        ask = getattr(inner, "keeps_versions", None)
    try:
        answer = None if ask is None else ask()
        reason = "this store is not asked"
    except StorageError as error:
        answer, reason = None, error.message
    if answer is None:
        return None, f"whether the bucket keeps versions is not known ({reason})"
    kept = "the bucket keeps versions of replaced and deleted objects, which were not searched"
    return answer, kept if answer else "the store keeps no versions"
