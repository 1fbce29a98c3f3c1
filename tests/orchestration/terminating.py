"""Runs of Dagster in processes of their own, which a test terminates at a chosen call of the store.

As Dagster's launchers do it: the run is marked CANCELING, and its process gets SIGINT (Kubernetes
sends SIGTERM).
"""

import functools
import multiprocessing
import os
import re
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import dagster as dg
from dagster._core.instance import InstanceRef
from dagster._grpc.impl import core_execute_run
from dagster._utils.interrupts import capture_interrupts

from arroyo_dagster.orchestration import (
    ArroyoOptions,
    ArroyoStateStore,
    InProcessRunner,
    PipelineList,
    build_arroyo_definitions,
)
from arroyo_dagster.orchestration.pipelines.model import ListedPipeline
from arroyo_dagster.state import ObjectStore, open_store
from tests.orchestration.results import KEY
from tests.stores import Wrapper

T = TypeVar("T")
PATIENCE_SECONDS = 60.0


@dataclass(frozen=True)
class Phase:
    """A call of the store at which a run is terminated.

    Attributes:
        verb, path: the call; `path` is searched for as a regular expression.
        number: the first such call, the second…
        done: after the call, in place of before it.
    """

    verb: str
    path: str
    number: int = 1
    done: bool = False


@dataclass(frozen=True)
class Setting:
    """What the process of a run is told."""

    url: str
    phase: Phase
    there: Any
    release: Any


class Blocking(Wrapper):
    """A store that says when a phase has come, and waits there until it is released."""

    setting: Setting
    left = 0

    def _call(self, verb: str, path: str, action: Callable[[], T], data: bytes = b"") -> T:
        phase = self.setting.phase
        found = verb == phase.verb and re.search(phase.path, path) is not None
        if found:
            self.left -= 1
        if not found or self.left != 0:
            return action()
        if not phase.done:
            self._wait()
            return action()
        result = action()
        self._wait()
        return result

    def _wait(self) -> None:
        self.setting.there.set()
        self.setting.release.wait(PATIENCE_SECONDS)

    def delete_many(self, paths: Any) -> Any:
        """Count calls that delete something only."""
        doomed = tuple(paths)
        return super().delete_many(doomed) if doomed else self.inner.delete_many(doomed)


class BlockingStore(ArroyoStateStore):
    """The resource of the run's process: the test's store, which blocks at a phase."""

    def writable(self) -> ObjectStore:
        if "blocking" not in self._stores:
            setting = _SETTINGS[0]
            store = Blocking(open_store(setting.url))
            store.setting, store.left = setting, setting.phase.number
            self._stores["blocking"] = store
        found: ObjectStore = self._stores["blocking"]
        return found


_SETTINGS: list[Setting] = []


def definitions(store: ArroyoStateStore, *roots: str) -> dg.Definitions:
    """The definitions of managed pipelines."""
    listed = tuple(ListedPipeline(root, tuple(root.split("/")), managed=True) for root in roots)
    return build_arroyo_definitions(
        store,
        pipelines=PipelineList(store.checkpoint_url, listed),
        mode="maintain",
        options=ArroyoOptions(runner=InProcessRunner()),
    )


@functools.cache
def _resolved(name: str) -> dg.JobDefinition:
    store = BlockingStore(checkpoint_url="of the setting")
    return definitions(store, KEY).resolve_job_def(name)


def arroyo_compaction() -> dg.JobDefinition:
    """The job of that name."""
    return _resolved("arroyo_compaction")


def arroyo_gc() -> dg.JobDefinition:
    """The job of that name."""
    return _resolved("arroyo_gc")


def execute(setting: Setting, name: str, run_id: str, ref: InstanceRef) -> None:
    """Execute a run, in the process of its own."""
    _SETTINGS[:] = [setting]
    job = dg.reconstructable(arroyo_gc if name == "arroyo_gc" else arroyo_compaction)
    with capture_interrupts(), dg.DagsterInstance.from_ref(ref) as instance:
        run = instance.get_run_by_id(run_id)
        assert run is not None
        for _ in core_execute_run(job, run, instance, inject_env_vars=False):
            pass


class Terminator:
    """Launches runs and terminates them."""

    def __init__(self, instance: dg.DagsterInstance) -> None:
        self.instance = instance
        # Forked from a process that has imported everything and started no thread.
        self._processes = multiprocessing.get_context("forkserver")
        self._processes.set_forkserver_preload(["tests.orchestration.terminating_preload"])

    def terminated(
        self,
        url: str,
        job: str,
        config: Any,
        phase: Phase,
        *,
        signals: tuple[int, ...] = (signal.SIGINT,),
        canceling: bool = True,
    ) -> str:
        """Execute a run of a job until a phase comes, terminate it there, and give its id.

        Args:
            signals: sent one after the other.
            canceling: mark the run as CANCELING first, as a launcher does; else as failed, as
                Dagster's daemon does with a run that exceeds its maximum runtime.
        """
        there, release = self._processes.Event(), self._processes.Event()
        setting = Setting(url, phase, there, release)
        definition = arroyo_gc() if job == "arroyo_gc" else arroyo_compaction()
        run = self.instance.create_run_for_job(definition, run_config=config)
        process = self._processes.Process(
            target=execute, args=(setting, job, run.run_id, self.instance.get_ref())
        )
        process.start()
        try:
            assert there.wait(PATIENCE_SECONDS), f"{phase} never came"
            if canceling:
                self.instance.report_run_canceling(run)
            else:
                self.instance.report_run_failed(run, "Exceeded maximum runtime of 1 seconds.")
            assert process.pid is not None
            for one in signals:
                os.kill(process.pid, one)
                time.sleep(0.2)  # a thread that waits at the phase must not go on before
            release.set()
            process.join(PATIENCE_SECONDS)
            assert not process.is_alive(), "the run goes on"
        finally:
            if process.is_alive():
                process.kill()
            process.join()
        return run.run_id


def events_of(instance: dg.DagsterInstance, run_id: str) -> list[str]:
    """The types of the events of a run, in order."""
    logs = instance.all_logs(run_id)
    return [
        entry.dagster_event.event_type_value for entry in logs if entry.dagster_event is not None
    ]
