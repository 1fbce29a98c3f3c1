"""Where the list of pipelines comes from when definitions load.

A code server lists them when it starts. Its runs get that list from Dagster: a run never sees other
assets than its code server. Whatever fails becomes the `problem` of the last list, or of an empty
one, which `fleet` shows: the definitions load in any case.
"""

import tempfile
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import dagster as dg

# As dagster-fivetran, -airbyte and -tableau do it; Dagster has no public way outside of components.
from dagster._core.definitions.definitions_load_context import StateBackedDefinitionsLoader

# Nor one to the version that a refresh replaces.
from dagster._core.storage.defs_state.base import DefsStateStorage

from arroyo_dagster.errors import ArroyoStateError, FormatError, StorageError
from arroyo_dagster.orchestration.pipelines.model import PipelineList
from arroyo_dagster.orchestration.resources import ArroyoDirectory, ArroyoStateStore, dagster_home
from arroyo_dagster.orchestration.secrets import resolve_variables
from arroyo_dagster.redaction import redact_text, redact_url

if TYPE_CHECKING:
    from dagster.components.utils.defs_state import DefsStateConfig

LIST_WITHIN = 20.0
"""The most seconds for a list."""


@dataclass(frozen=True, kw_only=True)
class PipelineSource:
    """Lists the pipelines of a deployment.

    Attributes:
        within_seconds: the most time for the list.
        cache: the file of the last list; by default below DAGSTER_HOME.
        gone: jobs that were deleted on purpose, as job or pipeline/job.
    """

    store: ArroyoStateStore
    directory: ArroyoDirectory
    deployment: str | None = None
    within_seconds: float = LIST_WITHIN
    cache: str | Path | None = None
    gone: Sequence[str] = ()

    def listed(self, last: PipelineList | None = None) -> PipelineList:
        """List the pipelines, and keep the list. What fails is its `problem`, and no error.

        Args:
            last: the last list, where the file of the last list has none.
        """
        from arroyo_dagster.orchestration.pipelines.cache import ListCache
        from arroyo_dagster.orchestration.pipelines.listing import list_pipelines
        from arroyo_dagster.state.model.clock import wall_clock

        url = _display_url(self.store.checkpoint_url)
        try:
            for resource in (self.store, self.directory):
                resolve_variables(type(resource).__name__, dict(resource))  # says what is not set
            store = self.store.process_config_and_initialize()
            directory = self.directory.process_config_and_initialize()
            url = redact_url(store.checkpoint_url)
            path = self._path(url)
            cache = None if path is None else ListCache(path)
            last = (cache.read() if cache is not None else None) or last
            listed = list_pipelines(
                store.reading(),
                directory.directory(store),
                last,
                url=url,
                gone=self.gone,
                layout=store.chosen_layout(),
                within_seconds=self.within_seconds,
                now_micros=wall_clock(),
            )
        except Exception as error:  # whatever it is, other assets of the code location load
            return replace(last or PipelineList(url), problem=_reason(error))
        try:
            return listed if cache is None else cache.write(listed)
        except ArroyoStateError as error:
            return replace(listed, problem=_reason(error))

    def _path(self, url: str) -> Path | None:
        from arroyo_dagster.orchestration.pipelines.cache import default_path

        home = dagster_home()
        if self.cache is not None:
            return Path(self.cache)
        return default_path(home, self.deployment, url) if home else None

    def definitions(self, build: Callable[[PipelineList], dg.Definitions]) -> dg.Definitions:
        """Build definitions of the list; in the process of a run, of that of its code server."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", dg.PreviewWarning)  # of what Dagster itself calls
            return _Loader(self, build).build_defs()


@dataclass(frozen=True)
class _Loader(StateBackedDefinitionsLoader[str]):
    source: PipelineSource
    build: Callable[[PipelineList], dg.Definitions]

    @property
    def defs_key(self) -> str:
        url = _display_url(self.source.store.checkpoint_url)
        return f"arroyo_pipelines/{self.source.deployment or ''}/{url}"

    def fetch_state(self) -> str:
        return self.source.listed().to_json()

    def defs_from_state(self, state: str) -> dg.Definitions:
        return self.build(PipelineList.from_json(state))


def refresh_list(
    source: PipelineSource, path: Path, config: "DefsStateConfig", *, loading: bool
) -> None:
    """Write the list of a component. Where listing fails, the last list stays, with the reason.

    Args:
        path: the file; Dagster leaves the last list there, or keeps it as a version.
        loading: whether definitions load, which then show what is wrong.

    Raises:
        StorageError: listing failed, and there is no last list.
        FormatError: the last list cannot be read; it is kept.
    """
    text = _last_text(path, config)
    try:
        listed = source.listed(None if text is None else PipelineList.from_json(text, str(path)))
        text = listed.to_json()
    except FormatError:
        if not loading:
            raise
        assert text is not None
    else:
        if listed.problem is not None and not listed.pipelines and not loading:
            raise StorageError(f"the pipelines cannot be listed: {listed.problem}")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def _last_text(path: Path, config: "DefsStateConfig") -> str | None:
    if path.is_file():
        return path.read_text(encoding="utf-8")
    storage = DefsStateStorage.get()
    if storage is None or config.management_type.value != "VERSIONED_STATE_STORAGE":
        return None
    version = storage.get_latest_version(config.key)
    if version is None or version.startswith("__"):  # of another kind
        return None
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "state"
        storage.download_state_to_path(config.key, version, file)
        return file.read_text(encoding="utf-8")


def read_state(path: Path, url: str) -> PipelineList:
    """Return the list of a component. A list of another URL is in force, and names what to do."""
    listed, here = read_list(path, url), _display_url(url)
    if listed.problem is not None or listed.url == here:
        return listed
    problem = (
        f"the list is of {listed.url}, and the checkpoint URL is {here}. Next: run `dg utils "
        "refresh-defs-state`; if two components share the list, give one a `deployment`, or its "
        "`defs_state` a `key`"
    )
    return replace(listed, problem=problem)


def read_list(path: str | Path, url: str) -> PipelineList:
    """Return the list in a file; an empty one with a problem if it cannot be read."""
    try:
        return PipelineList.from_json(Path(path).read_text(encoding="utf-8"), str(path))
    except (ArroyoStateError, OSError, ValueError) as error:
        return PipelineList(_display_url(url), problem=_reason(error))


def _display_url(url: str) -> str:
    """Return a URL without secrets; the name of a variable, which may not be set."""
    return url.env_var_name if isinstance(url, dg.EnvVar) else redact_url(url)


def _reason(error: Exception) -> str:
    """Return an error in one line, without secrets."""
    return redact_text(" ".join(str(error).split()) or type(error).__name__)
