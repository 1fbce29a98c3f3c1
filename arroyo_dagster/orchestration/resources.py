"""The stores and the Spark session, configured. Nothing is opened before it is asked for."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import dagster as dg
from pydantic import Field, PrivateAttr

from arroyo_dagster.errors import InputError
from arroyo_dagster.redaction import register_settings
from arroyo_dagster.state.model.layout import JobPaths, Layout

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from arroyo_dagster.state.local.directory import JobDirectory
    from arroyo_dagster.state.storage.store import ObjectStore

CATALOGUE_DIRECTORY = "arroyo_catalogue"


class ArroyoStateStore(dg.ConfigurableResource):  # type: ignore[type-arg]
    """Where jobs keep their checkpoints, and where what is known of them is catalogued."""

    checkpoint_url: str = Field(description="The checkpoint URL, in any form Arroyo takes.")
    storage_options: dict[str, Any] = Field(
        default_factory=dict,
        repr=False,
        description="For the client of a remote store; never shown.",
    )
    arroyo_api_url: str | None = Field(
        default=None, description="Arroyo's REST API, to ask what its jobs are doing; read only."
    )
    arroyo_api_token: str | None = Field(
        default=None, repr=False, description="For that API; else from ARROYO_API_TOKEN."
    )
    arroyo_database: str | None = Field(
        default=None, description="The controller's state.sqlite; only a copy of it is opened."
    )
    layout: str = Field(default="auto", description="auto, legacy or protocol: which jobs to see.")
    catalogue_url: str | None = Field(
        default=None, description="Where the catalogue is kept; below DAGSTER_HOME by default."
    )
    catalogue_options: dict[str, Any] = Field(
        default_factory=dict, repr=False, description="As storage_options, for the catalogue."
    )
    _stores: dict[str, Any] = PrivateAttr(default_factory=dict)
    _instance_directory: str | None = PrivateAttr(default=None)

    def setup_for_execution(self, context: dg.InitResourceContext) -> None:
        """Remember where the instance keeps its files, in case DAGSTER_HOME is not set."""
        if context.instance is not None:
            self._instance_directory = context.instance.storage_directory()

    def writable(self) -> "ObjectStore":
        """The store of the checkpoint URL; for maintenance alone."""
        return self._opened(self.checkpoint_url, self.storage_options)

    def reading(self) -> "ObjectStore":
        """The store of the checkpoint URL, write-protected: for everything that only looks."""
        from arroyo_dagster.state.storage.wrappers import WriteProtected

        return WriteProtected(self.writable())

    def directory(self, said: dict[str, str] | None) -> "JobDirectory":
        """Who is asked what jobs are doing.

        Args:
            said: the user's own word, by job.
        """
        from arroyo_dagster.state.local.directory import open_directory

        return open_directory(
            api=self.arroyo_api_url,
            token=self.arroyo_api_token or os.environ.get("ARROYO_API_TOKEN"),
            database=self.arroyo_database,
            said=said or {},
        )

    def catalogue(self) -> "ObjectStore":
        """The store of the catalogue.

        Raises:
            InputError: it would lie below the checkpoint URL, or nobody said where it lies.
        """
        found = self._opened(self._catalogue_url(), self.catalogue_options)
        if f"{found.url}/".startswith(f"{self.writable().url}/"):
            raise InputError(
                "the catalogue cannot lie below the checkpoint URL, where looking writes nothing",
                url=found.url,
                next_step="give catalogue_url a place of its own",
            )
        return found

    def chosen_layout(self) -> Layout | None:
        """The layout to look at; None = both.

        Raises:
            InputError: there is no such layout.
        """
        if self.layout == "auto":
            return None
        if self.layout not in {layout.value for layout in Layout}:
            raise InputError(
                "there is no such layout",
                layout=self.layout,
                next_step="say auto, legacy or protocol",
            )
        return Layout(self.layout)

    def jobs(self) -> list[JobPaths]:
        """The jobs there are now, by path. Errors as `list_jobs`."""
        from arroyo_dagster.state.local.jobs import list_jobs

        layout = self.chosen_layout()
        found = list_jobs(self.reading())
        return [paths for paths in found if layout is None or paths.layout is layout]

    def _opened(self, url: str, options: dict[str, Any]) -> "ObjectStore":
        from arroyo_dagster.state.storage.open import open_store

        if url not in self._stores:
            absolute = url if ":" in url else os.path.abspath(url)
            self._stores[url] = open_store(absolute, options=options)
        store: ObjectStore = self._stores[url]
        return store

    def _catalogue_url(self) -> str:
        if self.catalogue_url:
            return self.catalogue_url
        home = os.environ.get("DAGSTER_HOME") or self._instance_directory
        if home is None:
            raise InputError(
                "nobody said where the catalogue lies",
                next_step="set DAGSTER_HOME, or give catalogue_url",
            )
        return str(Path(home).absolute() / CATALOGUE_DIRECTORY)


class SparkSessionResource(dg.ConfigurableResource):  # type: ignore[type-arg]
    """The Spark session of this process, started when first asked for."""

    master: str = Field(default="local[*]", description="Where Spark runs.")
    remote_url: str | None = Field(
        default=None, description="sc://host:port to use Spark Connect instead."
    )
    conf: dict[str, str] = Field(
        default_factory=dict, repr=False, description="Settings, before our own."
    )
    stop_on_teardown: bool = Field(
        default=True, description="Stop the session at the end of a step that started it."
    )
    _session: Any = PrivateAttr(default=None)
    _ours: bool = PrivateAttr(default=False)

    @property
    def session(self) -> "SparkSession":
        """The session; a step that never asks pays nothing.

        Raises:
            StorageError: Spark could not be started; says what it needs.
        """
        if self._session is None:
            register_settings({**self.conf, "remote_url": self.remote_url})
            self._session, self._ours = self._started()
        session: SparkSession = self._session
        return session

    def _started(self) -> "tuple[SparkSession, bool]":
        from pyspark.sql import SparkSession

        from arroyo_dagster.spark.session import get_session

        if self.remote_url is None:
            return get_session(self.master, self.conf)
        before = SparkSession.getActiveSession()
        builder = SparkSession.builder.remote(self.remote_url)
        for name, value in self.conf.items():
            builder = builder.config(name, value)
        return builder.getOrCreate(), before is None

    @contextmanager
    def yield_for_execution(
        self, context: dg.InitResourceContext
    ) -> "Iterator[SparkSessionResource]":
        """Stop, at the end, the session that was started here."""
        try:
            yield self
        finally:
            if self._session is not None and self._ours and self.stop_on_teardown:
                self._session.stop()
            self._session = None
