"""Where the catalogue is stored, and the check that every host of a Dagster instance sees the same
one.
"""

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING

import dagster as dg

from arroyo_dagster.errors import InputError
from arroyo_dagster.state.model.ids import checked_name
from arroyo_dagster.state.model.json_fields import parse_json

if TYPE_CHECKING:
    from arroyo_dagster.state.storage.store import ObjectStore

CATALOGUE_DIRECTORY = "arroyo_catalogue"
CATALOGUE_TTL_SECONDS = 3600
"""How long a run trusts what the last tick reported about the catalogue."""

_OF_DAGSTER = "dagster"
_KEY = "arroyo_catalogue"
_COMPONENTS = (
    *("run_launcher_data", "storage_data", "run_storage_data", "event_storage_data"),
    *("schedule_storage_data", "custom_instance_class_data"),
)


def local_catalogue(home: str, deployment: str | None, digest: str) -> Path:
    """Return the directory of the catalogue of one deployment and checkpoint URL below
    DAGSTER_HOME.

    Args:
        digest: of the checkpoint URL.

    Raises:
        InputError: the deployment's name cannot be used as a directory name.
    """
    root = Path(home).absolute() / CATALOGUE_DIRECTORY
    if deployment is None:
        return root / "default" / digest
    return root / "deployments" / checked_name(deployment, "deployment") / digest


def remote_components(instance: dg.DagsterInstance) -> list[str]:
    """Return the classes of an instance that may run on other hosts.

    Storage and run launchers that come with Dagster itself (SQLite, memory, subprocesses) serve one
    host; those of other packages (Postgres, Kubernetes, Docker) may serve several.
    """
    if not instance.is_persistent:
        return []
    ref = instance.get_ref()
    parts = [getattr(ref, name, None) for name in _COMPONENTS]
    strange = [one for one in parts if one and one.module_name.split(".")[0] != _OF_DAGSTER]
    return list(dict.fromkeys(one.class_name for one in strange))


def require_catalogue_url(parts: list[str]) -> None:
    """Refuse a catalogue below DAGSTER_HOME if hosts have one each.

    Raises:
        InputError: always.
    """
    raise InputError(
        f"catalogue_url is required: with {' and '.join(parts)}, ticks and runs may be on "
        "different hosts, and each host has its own DAGSTER_HOME",
        next_step="set catalogue_url (of ArroyoStateStore or the component; the variable "
        "ARROYO_CATALOGUE_URL for definitions.py) to a place that every host reaches, not below "
        "the checkpoint URL",
    )


def announce_catalogue(
    instance: dg.DagsterInstance, place: str, catalogue: "ObjectStore", identity: str
) -> None:
    """Record, in a tick, which catalogue the code server sees."""
    said = {"id": identity, "url": catalogue.url, "at": time.time()}
    instance.daemon_cursor_storage.set_cursor_values({_key(place): json.dumps(said)})


def check_catalogue(instance: dg.DagsterInstance, place: str, catalogue: "ObjectStore") -> None:
    """Check, in a run, that the catalogue contains what the code server wrote into it.

    Raises:
        InputError: it does not: the run and the code server see different catalogues.
    """
    from arroyo_dagster.state.operations.catalog.owner import read_owner

    text = instance.daemon_cursor_storage.get_cursor_values({_key(place)}).get(_key(place))
    said = parse_json(text) if text else {}
    # Where sensors and schedules are off, what they said last is no proof of anything.
    if not said or time.time() - said["at"] > CATALOGUE_TTL_SECONDS:
        return
    owner = read_owner(catalogue)
    if owner is None or owner.identity != said["id"]:
        raise InputError(
            "this run does not see the catalogue that the code server writes: catalogue_url is "
            "not the same place for both",
            catalogue_of_the_run=catalogue.url,
            catalogue_of_the_code_server=said["url"],
            next_step="set catalogue_url to a place that every host reaches; after a change, "
            "wait for the next tick",
        )


def _key(place: str) -> str:
    from arroyo_dagster.state.operations.catalog.owner import place_digest

    return f"{_KEY}:{place_digest(place)}"
