"""Maintenance, and commands of `arroyo-state`, in processes that a Dagster Pipes client starts.

A run asks through the extras of Pipes, and gets one answer as custom messages; see `cli.pipes`. Of
a client only `run(context, extras, …)` is used, so every client of Dagster's libraries fits.
"""

import copy
import importlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import dagster as dg
from pydantic import Field

from arroyo_dagster.errors import InputError, StorageError
from arroyo_dagster.orchestration.failures import as_failure
from arroyo_dagster.orchestration.resources import SPARK_TAG, ArroyoStateStore, absolute_url
from arroyo_dagster.orchestration.runners import InProcessRunner, SparkThresholdFields
from arroyo_dagster.orchestration.secrets import NamedSecrets, refuse_secrets, variable_of
from arroyo_dagster.redaction import redact_text, redacted_cause
from arroyo_dagster.state.model.compaction import CompactionSettings, MergeOutcome
from arroyo_dagster.state.model.garbage import PlanKind
from arroyo_dagster.state.model.layout import JobPaths
from arroyo_dagster.state.planning.engines import EngineChoice, StepEngine, WorkAmount

if TYPE_CHECKING:
    from arroyo_dagster.state.model.garbage import GcPlan
    from arroyo_dagster.state.operations.compaction.job import CompactionOptions
    from arroyo_dagster.state.operations.compaction.publish import CompactionOutcome
    from arroyo_dagster.state.operations.gc.execute import GcOptions, GcOutcome
    from arroyo_dagster.state.operations.gc.plan import GcRequest
    from arroyo_dagster.state.storage.store import ObjectStore

EXTERNAL_TAG = "arroyo/external"
"""The tag of a run with what the Pipes client says of the process, such as its id and its page."""
_MOST_CHARACTERS = 200
_ONLY_HERE = "the job's status comes from a source that only this host has"


class _StepContext(dg.OpExecutionContext):
    """The context of a step that yields its own events, or none if there was nothing to do."""

    def set_requires_typed_event_stream(self, *, error_message: str | None = None) -> None:
        """Do not demand that the step yields what the process reports: it reports one answer."""


def run_pipes_command(
    context: dg.AssetExecutionContext | dg.OpExecutionContext,
    client: dg.PipesClient,
    command: Sequence[str],
    /,
    **arguments: Any,
) -> dict[str, Any]:
    """Run a command of `arroyo-state` in a process that a Pipes client starts.

    What the command prints as progress is in the log of the run. Ending the run ends the process.

    Args:
        context: of the op or asset that calls this.
        command: for example `["run", "shop.py:pipeline", "--spark", "--url", URL]`; `--json` is
            added.
        **arguments: of `client.run`, such as the `command` of `PipesSubprocessClient`, which calls
            `arroyo_dagster.cli.pipes.serve`.

    Returns:
        The JSON document that the command prints.

    Raises:
        dagster.Failure, dagster.RetryRequested: as `as_failure`, with the error of the command.
    """
    with as_failure():
        request = {"do": "command", "arguments": [str(word) for word in command]}
        answer = _ask(context, client, arguments, request)
        document: dict[str, Any] = answer["document"]
        return document


def load_client(name: str) -> dg.PipesClient:
    """Return the client that `module:name` names, or that the function of this name returns.

    Raises:
        InputError: there is no such client.
    """
    module, _, attribute = name.partition(":")
    try:
        client: Any = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise InputError(
            f"there is no Pipes client {name!r} ({redact_text(str(error))})",
            next_step="name it as module:name; the module must be importable",
        ) from error
    if callable(client) and not isinstance(client, dg.PipesClient):
        client = client()
    if not isinstance(client, dg.PipesClient):
        raise InputError(
            f"{name!r} is no Pipes client, but of type {type(client).__name__}",
            next_step="name a PipesClient, or a function without arguments that returns one",
        )
    return client


class PipesRunner(SparkThresholdFields, InProcessRunner, NamedSecrets):
    """Compacts jobs and runs gc in a process that a Dagster Pipes client starts, for example an
    application of `spark-submit`. Below the thresholds the process of the step does it.
    """

    one_job_at_a_time: ClassVar[bool] = True

    client: dg.ResourceDependency[dg.PipesClient]
    store: dg.ResourceDependency[ArroyoStateStore]
    arguments: dict[str, Any] = Field(
        default_factory=dict,
        repr=False,
        description="Arguments of the client's method run, for example command. The process calls "
        "arroyo_dagster.cli.pipes.serve.",
    )

    def run_compaction(
        self,
        store: "ObjectStore",
        paths: JobPaths,
        settings: CompactionSettings,
        options: "CompactionOptions",
    ) -> "CompactionOutcome":
        from arroyo_dagster.state.codec.derived import plain_values, value_from_json
        from arroyo_dagster.state.operations.compaction.plan import plan_compaction
        from arroyo_dagster.state.operations.compaction.publish import CompactionOutcome

        planned = plan_compaction(store, paths, settings).merges
        files = sum(len(merge.paths) for merge in planned)
        amount = WorkAmount(size_bytes=sum(merge.size_bytes for merge in planned), files=files)
        choice = self.thresholds.choose("merge files", amount)
        if choice.engine is StepEngine.IN_PROCESS:
            outcome = super().run_compaction(store, paths, settings, options)
            return replace(outcome, engines=(choice,))

        def report(merges: Sequence[Any]) -> None:
            for number, merge in enumerate(merges, 1):
                options.on_merge(value_from_json(MergeOutcome, merge), len(merges) - number)

        answer = self._ask(
            "compact",
            paths,
            _values(options, "owner", "lease_wait_seconds", "sampled", "wait_seconds"),
            {"settings": plain_values(settings)},
            on_error=lambda partial: report(partial.get("merges", ())),
        )
        report(answer["outcome"]["merges"])
        outcome = value_from_json(CompactionOutcome, answer["outcome"])
        if outcome.changed:
            options.on_published(outcome)
        return outcome

    def run_gc(
        self,
        store: "ObjectStore",
        paths: JobPaths,
        request: "GcRequest",
        options: "GcOptions",
        *,
        plan: "GcPlan",
    ) -> "GcOutcome":
        from arroyo_dagster.state.codec.derived import plain_values, value_from_json
        from arroyo_dagster.state.codec.gc import decode_gc_plan
        from arroyo_dagster.state.operations.gc.execute import GcOutcome

        choice = self._choose_gc(request, options, plan)
        if choice.engine is StepEngine.IN_PROCESS:
            outcome = super().run_gc(store, paths, request, options, plan=plan)
            return replace(outcome, engines=(choice,))
        names = ("quarantine", "max_checkpoint_slowdown", "journal_micros")
        answer = self._ask(
            "gc",
            paths,
            _values(options, "owner", "lease_wait_seconds", *names),
            {
                **_values(request, "grace_micros", "purge_after_micros"),
                "kind": request.kind.value,
                "retention": plain_values(request.retention),
                "approved_plan": plan.digest if options.approved else None,
                "arroyo_api_url": self.store.arroyo_api_url,
            },
        )
        fields = dict(answer["outcome"])
        engines = tuple(value_from_json(EngineChoice, choice) for choice in fields.pop("engines"))
        data = json.dumps(answer["plan"]).encode()
        executed = decode_gc_plan(data, "the answer of the Pipes process")
        outcome = GcOutcome(plan=executed, engines=engines, **fields)
        options.on_done(outcome)
        return outcome

    def _choose_gc(
        self, request: "GcRequest", options: "GcOptions", plan: "GcPlan"
    ) -> EngineChoice:
        """Choose where a plan is executed.

        The process elsewhere makes its own plan. It can ask the API, but neither a database nor
        what a user assumes; of managed jobs nobody is asked. It gets no listing.
        """
        copied = options.quarantine
        amount = WorkAmount(
            size_bytes=plan.size_bytes if copied else 0,
            files=plan.objects if copied else 0,
            objects=plan.objects,
        )
        managed = plan.proof.condition is None and request.kind is not PlanKind.DEAD_JOB
        api_only = len(request.directory.sources) == (self.store.arroyo_api_url is not None)
        plain = request.listing is None and request.others is None and not request.unreadable
        portable = plain and (managed or api_only)
        return self.thresholds.choose("delete", amount, only_here=None if portable else _ONLY_HERE)

    def _ask(
        self,
        what: str,
        paths: JobPaths,
        options: Mapping[str, Any],
        more: Mapping[str, Any],
        on_error: Any = None,
    ) -> dict[str, Any]:
        from arroyo_dagster.state.codec.derived import plain_values

        request = {
            "do": what,
            "job": plain_values(paths),
            "store": _store_request(self.store),
            "options": options,
            **more,
        }
        refuse_secrets(type(self).__name__, request)
        context = dg.OpExecutionContext.get()
        return _ask(context, self.client, self.arguments, request, on_error=on_error)


def _values(values: Any, *names: str) -> dict[str, Any]:
    return {name: getattr(values, name) for name in names}


def _store_request(store: ArroyoStateStore) -> dict[str, Any]:
    """Return how to open the store elsewhere: with names of variables, never with secrets."""
    from arroyo_dagster.state.storage.read_only import read_only_prefixes

    return {
        "url": absolute_url(store.checkpoint_url),
        "storage_options": _with_names(store.storage_options),
        "delete_options": _with_names(store.delete_options),
        "read_only": [(entry.prefix, entry.file) for entry in read_only_prefixes()],
    }


def _with_names(value: Any) -> Any:
    variable = variable_of(value)
    if variable is not None:
        return {"env": variable}
    if isinstance(value, Mapping):
        return {name: _with_names(item) for name, item in value.items()}
    return [_with_names(item) for item in value] if isinstance(value, list | tuple) else value


def _ask(
    context: Any,
    client: dg.PipesClient,
    arguments: Mapping[str, Any],
    request: Mapping[str, Any],
    *,
    on_error: Any = None,
) -> dict[str, Any]:
    """Start a process that does what is asked, and return its answer.

    Args:
        on_error: called with the answer, if it is an error.

    Raises:
        ArroyoStateError: what the process answers.
        StorageError: the process ended without an answer.
    """
    from arroyo_dagster.state.codec.messages import REQUEST, error_from_json, join_documents

    version = importlib.import_module("arroyo_dagster").__version__
    named: dict[str, Any] = {"client": type(client).__name__, "retryable": False}
    try:
        # Some clients change what they are given.
        done = client.run(
            context=_StepContext(context.get_step_execution_context()),
            extras={REQUEST: {**request, "version": version}},
            **copy.deepcopy(dict(arguments)),
        )
    except Exception as error:
        raise StorageError(
            f"the process of the Pipes client failed ({redact_text(str(error))})",
            **named,
            next_step="read its output in the log of the run",
        ) from redacted_cause(error)
    if done.metadata:
        text = ", ".join(f"{name}: {entry.value}" for name, entry in done.metadata.items())
        context.log.info(f"the process of the Pipes client: {text}")
        _tag(context, EXTERNAL_TAG, text)
    answers = list(join_documents(done.get_custom_messages()))
    if not answers:
        raise StorageError(
            "the process of the Pipes client ended without an answer",
            **named,
            next_step="let it call arroyo_dagster.cli.pipes.serve, with the message writer that "
            "fits the message reader of the client",
        )
    answer = answers[-1]
    if "spark" in answer:
        _tag(context, SPARK_TAG, str(answer["spark"]))
    if "error" in answer:
        if on_error is not None:
            on_error(answer)
        raise error_from_json(answer["error"])
    return answer


def _tag(context: Any, name: str, text: str) -> None:
    context.instance.add_run_tags(context.run.run_id, {name: text[:_MOST_CHARACTERS]})
