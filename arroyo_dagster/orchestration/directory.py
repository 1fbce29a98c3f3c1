"""Where the status of Arroyo jobs comes from, as a resource. No source is queried before it is
needed.
"""

from typing import TYPE_CHECKING, Any

from pydantic import Field

from arroyo_dagster.errors import InputError
from arroyo_dagster.orchestration.resources import ArroyoStateStore
from arroyo_dagster.orchestration.secrets import NamedSecrets

if TYPE_CHECKING:
    from arroyo_dagster.state.operations.catalog.job_directory import JobDirectory
    from arroyo_dagster.state.storage.arroyo.api import ArroyoControl


class ArroyoDirectory(NamedSecrets):
    """Sources of the status of Arroyo jobs: the REST API, the database, or your assumptions.

    What is not set here is taken from the store resource. Without any source, no Arroyo job is
    rewritten.
    """

    plain_fields = frozenset({"assume"})

    api_url: str | None = Field(
        default=None,
        description="Arroyo's REST API, http://HOST:5115; takes precedence over the other sources.",
    )
    api_token: str | None = Field(
        default=None,
        repr=False,
        description="A bearer token for the API, if it needs one: a dg.EnvVar.",
    )
    database: str | None = Field(
        default=None, description="The controller's state.sqlite, a path or URL; it is only read."
    )
    assume: dict[str, Any] = Field(
        default_factory=dict,
        description="Assumed status by job or pipeline/job: stopped, running…; the other sources "
        "take precedence.",
    )

    def directory(self, store: ArroyoStateStore) -> "JobDirectory":
        """Return the sources set here, else those of the store resource.

        Raises:
            InputError: one of them cannot be used.
        """
        from arroyo_dagster.state.operations.catalog.job_directory import open_directory

        if self.api_url is None and self.database is None:
            return store.directory(self.assume)
        return open_directory(
            api=self.api_url, token=self.api_token, database=self.database, assumed=self.assume
        )

    def control(self, store: ArroyoStateStore) -> "ArroyoControl":
        """Return the API client that stops and starts jobs.

        Raises:
            InputError: no API is configured.
        """
        from arroyo_dagster.state.storage.arroyo.api import ArroyoControl

        url, token = self.api_url, self.api_token
        if url is None:
            url, token = store.arroyo_api_url, store.arroyo_api_token
        if url is None:
            raise InputError(
                "a maintenance window needs Arroyo's REST API, to stop and start the job",
                next_step="set arroyo_api_url of the store, or api_url of arroyo_directory",
            )
        return ArroyoControl(url, token=token)
