"""What a user assumes of Arroyo jobs, as a resource, beside the sources of their status."""

from typing import TYPE_CHECKING, Any

from pydantic import Field

from arroyo_dagster.errors import InputError
from arroyo_dagster.orchestration.resources import ArroyoStateStore
from arroyo_dagster.orchestration.secrets import NamedSecrets

if TYPE_CHECKING:
    from arroyo_dagster.state.operations.catalog.job_directory import JobDirectory
    from arroyo_dagster.state.storage.arroyo.api import ArroyoControl


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
