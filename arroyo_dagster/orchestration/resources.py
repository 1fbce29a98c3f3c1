"""Resources for the stores and the Spark session. They open nothing before it is needed."""

import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import dagster as dg
from pydantic import Field, PrivateAttr

from arroyo_dagster.errors import InputError
from arroyo_dagster.orchestration.secrets import (
    NamedSecrets,
    refuse_secrets,
    resolve_variables,
    typed_fields,
    variable_of,
)
from arroyo_dagster.orchestration.settings import setting_field
from arroyo_dagster.spark.settings import SparkSettings
from arroyo_dagster.state.model.layout import JobPaths, Layout

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from arroyo_dagster.state.operations.catalog.job_directory import JobDirectory
    from arroyo_dagster.state.operations.catalog.jobs import JobListing
    from arroyo_dagster.state.storage.arroyo.api import ArroyoControl
    from arroyo_dagster.state.storage.store import ObjectStore

SPARK_TAG = "arroyo/spark"
"""The tag of a run with the Spark that it used, and why."""

OPTIONS = (
    "Options of a remote store's client. For secrets, name environment variables: dg.EnvVar, or "
    "{env: NAME}. They are resolved where the store is opened."
)


class ArroyoStateStore(NamedSecrets):
    """The store of the jobs' checkpoints."""

    checkpoint_url: str = Field(description="The checkpoint URL, in any form that Arroyo takes.")
    storage_options: dict[str, Any] = Field(default_factory=dict, repr=False, description=OPTIONS)
    delete_options: dict[str, Any] = Field(
        default_factory=dict,
        repr=False,
        description="Options of a client that only deletes, in the form of storage_options. With "
        "them, storage_options need no permission to delete.",
    )
    arroyo_api_url: str | None = Field(
        default=None,
        description="Arroyo's REST API, as a source of job names and status; read only.",
    )
    arroyo_api_token: str | None = Field(
        default=None,
        repr=False,
        description="The token of that API, a dg.EnvVar. Default: ARROYO_API_TOKEN.",
    )
    arroyo_database: str | None = Field(
        default=None,
        description="The controller's state.sqlite, as a source of job names and "
        "status; only a copy of it is opened.",
    )
    layout: str = Field(
        default="auto", description="Which jobs to show, by layout: auto, legacy or protocol."
    )
    _stores: dict[str, Any] = PrivateAttr(default_factory=dict)
    _typed: Any = PrivateAttr(default_factory=dict)

    def setup_for_execution(self, context: dg.InitResourceContext) -> None:
        """Remember what was typed into a launchpad, which must not be secrets either."""
        super().setup_for_execution(context)
        self._typed = typed_fields(
            type(self), {} if context.run is None else context.run.run_config
        )

    def check_fields(self) -> None:
        """Refuse secrets in the fields, and options that no client knows. Opens no connection.

        Raises:
            InputError: a field holds a secret, or an option has an unknown name.
        """
        super().check_fields()
        self._check_names("storage_options", self.checkpoint_url)
        self._check_names("delete_options", self.checkpoint_url)

    def _check_names(self, field: str, url: str | None) -> None:
        options = getattr(self, field)
        if not options or not url or variable_of(url) or variable_of(options.get("client")):
            return  # what a variable holds is not known before a tick or run
        from arroyo_dagster.state.storage.remote.option_names import check_option_names
        from arroyo_dagster.state.storage.urls import parse_url

        try:
            check_option_names(parse_url(absolute_url(url)), options)
        except InputError as error:
            error.facts.setdefault("field", field)
            raise

    def writable(self) -> "ObjectStore":
        """Return the store of the checkpoint URL. Only maintenance may call this.

        Raises:
            InputError: a variable that the options name is not set, or the configuration file
                cannot be read.
        """
        refuse_secrets("the configuration of this run", self._typed)
        return self._opened("storage_options", self.checkpoint_url)

    def maintained(self, roots: Iterable[str]) -> list[str]:
        """Return those roots of jobs that this deployment may change: neither marked by an object
        nor read-only by the configuration file.
        """
        from arroyo_dagster.state.metadata.ownership import is_marked, marked_prefixes
        from arroyo_dagster.state.storage.read_only import read_only_check

        store = self.reading()
        marks, is_read_only = marked_prefixes(store), read_only_check(store.url)
        return [root for root in roots if not is_marked(marks, root) and not is_read_only(root)]

    def reading(self) -> "ObjectStore":
        """Return the store of the checkpoint URL, write-protected, to read only."""
        from arroyo_dagster.state.storage.wrappers import WriteProtected

        return WriteProtected(self.writable())

    def directory(self, assumed: dict[str, str] | None) -> "JobDirectory":
        """Return the sources of job status.

        Args:
            assumed: the status that the user assumes, by job.
        """
        from arroyo_dagster.state.operations.catalog.job_directory import open_directory

        return open_directory(
            api=self.arroyo_api_url,
            token=self.arroyo_api_token or os.environ.get("ARROYO_API_TOKEN"),
            database=self.arroyo_database,
            assumed=assumed or {},
        )

    def chosen_layout(self) -> Layout | None:
        """Return the layout to show; None = both.

        Raises:
            InputError: there is no such layout.
        """
        if self.layout == "auto":
            return None
        if self.layout not in {layout.value for layout in Layout}:
            raise InputError(
                "there is no such layout",
                layout=self.layout,
                next_step="choose auto, legacy or protocol",
            )
        return Layout(self.layout)

    def jobs(self) -> list[JobPaths]:
        """Return the jobs that exist now, by path, without those in directories that cannot be
        listed. Errors as `listing`.
        """
        return list(self.listing().jobs)

    def listing(self) -> "JobListing":
        """Return the jobs that exist now, and the directories that cannot be listed. Errors as
        `list_readable_jobs`.
        """
        from arroyo_dagster.state.operations.catalog.jobs import list_readable_jobs

        layout = self.chosen_layout()
        listing = list_readable_jobs(self.reading())
        jobs = [paths for paths in listing.jobs if layout is None or paths.layout is layout]
        return replace(listing, jobs=jobs)

    def arroyo_page(self, paths: JobPaths, *, managed: bool | None = None) -> Any:
        """Return a link to the pipeline of a job in Arroyo's UI; None if the job is managed or the
        REST API, which serves the UI, is not configured.

        Args:
            managed: None = find out from the store.
        """
        if self.arroyo_api_url is None or paths.pipeline is None or managed:
            return None
        if managed is None:
            from arroyo_dagster.state.operations.compaction.rewrite_preconditions import (
                is_arroyo_job,
            )

            if not is_arroyo_job(self.reading(), paths):
                return None
        base = re.sub(r"(/api(/v1)?)?/*$", "", self.arroyo_api_url)
        return dg.MetadataValue.url(f"{base}/pipelines/{quote(paths.pipeline, safe='')}")

    def _opened(self, field: str, url: str) -> "ObjectStore":
        from arroyo_dagster.state.storage.remote.open import open_store

        if url not in self._stores:
            options, given = resolve_variables(field, getattr(self, field)), None
            if field == "storage_options" and self.delete_options:
                given = resolve_variables("delete_options", self.delete_options)
            self._stores[url] = open_store(absolute_url(url), options=options, delete_options=given)
        store: ObjectStore = self._stores[url]
        return store


def dagster_home() -> str | None:
    """Return the folder of the instance; None if it has none."""
    return os.environ.get("DAGSTER_HOME")


def absolute_url(url: str) -> str:
    """Return a URL, or the absolute form of a path."""
    return url if ":" in url else os.path.abspath(url)


class ArroyoDirectory(NamedSecrets):
    """Your assumptions about Arroyo jobs, where the API and database of the store say nothing.

    Without any source, no Arroyo job is rewritten.
    """

    plain_fields = frozenset({"assume"})

    assume: dict[str, Any] = Field(
        default_factory=dict,
        description="Assumed status by job or pipeline/job: stopped, running…; the API and the "
        "database of the store take precedence.",
    )

    def directory(self, store: ArroyoStateStore) -> "JobDirectory":
        """Return the sources of the store resource, and these assumptions.

        Raises:
            InputError: one of them cannot be used.
        """
        return store.directory(self.assume)

    def control(self, store: ArroyoStateStore) -> "ArroyoControl":
        """Return the API client that stops and starts jobs.

        Raises:
            InputError: no API is configured.
        """
        from arroyo_dagster.state.storage.arroyo.api import ArroyoControl

        if store.arroyo_api_url is None:
            raise InputError(
                "a maintenance window needs Arroyo's REST API, to stop and start the job",
                next_step="set arroyo_api_url of the store",
            )
        return ArroyoControl(store.arroyo_api_url, token=store.arroyo_api_token)


class SparkSessionResource(NamedSecrets):
    """The Spark session of this process, started at its first use."""

    master: str | None = setting_field(SparkSettings, "master")
    remote_url: str | None = setting_field(SparkSettings, "remote", repr=False)
    conf: dict[str, str] = setting_field(
        SparkSettings,
        "conf",
        repr=False,
        description="Settings of Spark. They take precedence over those of this package. For "
        "secrets, a dg.EnvVar.",
    )
    packages: list[str] = setting_field(SparkSettings, "packages")
    ship: bool = setting_field(SparkSettings, "ship")
    stop_on_teardown: bool = Field(
        default=True, description="Stop the session at the end of a step that started it."
    )
    _opened: Any = PrivateAttr(default=None)
    _context: Any = PrivateAttr(default=None)

    @property
    def settings(self) -> SparkSettings:
        """The settings of these fields.

        Raises:
            InputError: fields that exclude each other.
        """
        return SparkSettings(
            master=self.master,
            remote=self.remote_url,
            conf=self.conf,
            packages=tuple(self.packages),
            ship=self.ship,
        )

    @property
    def session(self) -> "SparkSession":
        """Return the session; a step that never calls this does not start one.

        A run that starts it is tagged with the Spark that was chosen, and why.

        Raises:
            InputError: pyspark is not installed; the message names the command that installs it.
            StorageError: Spark could not be started; the message names what it needs.
        """
        if self._opened is None:
            from arroyo_dagster.spark.session import open_session

            self._opened = open_session(self.settings)
            self._report(str(self._opened.choice))
        session: SparkSession = self._opened.session
        return session

    def _report(self, choice: str) -> None:
        if self._context is not None:
            self._context.log.info(f"Spark: {choice}")
            self._context.instance.add_run_tags(self._context.run.run_id, {SPARK_TAG: choice[:200]})

    @contextmanager
    def yield_for_execution(
        self, context: dg.InitResourceContext
    ) -> "Iterator[SparkSessionResource]":
        """Stop, at the end, the session that was started here."""
        self.setup_for_execution(context)
        self._context = context if context.run is not None else None
        try:
            yield self
        finally:
            if self._opened is not None and self._opened.started and self.stop_on_teardown:
                self._opened.session.stop()
            self._opened = self._context = None
