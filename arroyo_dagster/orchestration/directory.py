"""Who says what Arroyo's jobs are doing, configured. Nobody is asked before it matters."""

from typing import TYPE_CHECKING, Any

from pydantic import Field

from arroyo_dagster.errors import InputError
from arroyo_dagster.orchestration.resources import ArroyoStateStore
from arroyo_dagster.orchestration.secrets import NamedSecrets

if TYPE_CHECKING:
    from arroyo_dagster.state.operations.catalog.job_directory import JobDirectory
    from arroyo_dagster.state.storage.arroyo.api import ArroyoControl


class ArroyoDirectory(NamedSecrets):
    """Where to ask what Arroyo's jobs are doing: its REST API, its database, or your assumptions.

    What is not set here is taken from the store resource. Without any source no Arroyo job is
    rewritten.
    """

    plain_fields = frozenset({"assume", "said"})

    api_url: str | None = Field(
        default=None, description="Arroyo's REST API, http://HOST:5115; outranks the others."
    )
    api_token: str | None = Field(
        default=None,
        repr=False,
        description="A bearer token for it, if it wants one: a dg.EnvVar.",
    )
    database: str | None = Field(
        default=None, description="The controller's state.sqlite, a path or URL; only read."
    )
    assume: dict[str, Any] = Field(
        default_factory=dict,
        description="What to assume by job or pipeline/job: stopped, running…; it counts last.",
    )
    said: dict[str, Any] = Field(
        default_factory=dict,
        description="The old name of `assume`; release 0.3 removes it.",
    )

    def directory(self, store: ArroyoStateStore) -> "JobDirectory":
        """Whom to ask: those named here, else those that the store names.

        Raises:
            InputError: one of them cannot be used.
        """
        from arroyo_dagster.state.operations.catalog.job_directory import open_directory

        assumed = {**self.said, **self.assume}
        if self.api_url is None and self.database is None:
            return store.directory(assumed)
        return open_directory(
            api=self.api_url, token=self.api_token, database=self.database, assumed=assumed
        )

    def control(self, store: ArroyoStateStore) -> "ArroyoControl":
        """By whom jobs are stopped and started: the API, and nobody else.

        Raises:
            InputError: there is none.
        """
        from arroyo_dagster.state.storage.arroyo.api import ArroyoControl

        url, token = self.api_url, self.api_token
        if url is None:
            url, token = store.arroyo_api_url, store.arroyo_api_token
        if url is None:
            raise InputError(
                "a maintenance window needs Arroyo's REST API, to stop and start the job",
                next_step="give arroyo_api_url to the store, or api_url to arroyo_directory",
            )
        return ArroyoControl(url, token=token)
