"""Who says what Arroyo's jobs are doing, configured. Nobody is asked before it matters."""

from typing import TYPE_CHECKING, Any

import dagster as dg
from pydantic import Field

from arroyo_dagster.errors import InputError

if TYPE_CHECKING:
    from arroyo_dagster.state.local.directory import JobDirectory
    from arroyo_dagster.state.storage.arroyo_api import ArroyoControl


class ArroyoDirectory(dg.ConfigurableResource):  # type: ignore[type-arg]
    """Arroyo's REST API, its database, or your word. Without any, none of its jobs is rewritten."""

    api_url: str | None = Field(
        default=None, description="Arroyo's REST API, http://HOST:5115; outranks the others."
    )
    api_token: str | None = Field(
        default=None, description="A bearer token for it, if it wants one; use dg.EnvVar."
    )
    database: str | None = Field(
        default=None, description="The controller's state.sqlite, a path or URL; only read."
    )
    said: dict[str, Any] = Field(
        default_factory=dict,
        description="Your own word, by job or pipeline/job: stopped, running…; it counts last.",
    )

    def directory(self) -> "JobDirectory":
        """Whom to ask.

        Raises:
            InputError: one of them cannot be used.
        """
        from arroyo_dagster.state.local.directory import open_directory

        return open_directory(
            api=self.api_url, token=self.api_token, database=self.database, said=self.said
        )

    def control(self) -> "ArroyoControl":
        """By whom jobs are stopped and started: the API, and nobody else.

        Raises:
            InputError: there is none.
        """
        from arroyo_dagster.state.storage.arroyo_api import ArroyoControl

        if self.api_url is None:
            raise InputError(
                "a maintenance window needs Arroyo's REST API, to stop and start the job",
                next_step="give api_url to the resource arroyo_directory",
            )
        return ArroyoControl(self.api_url, token=self.api_token)
