"""Pool that runs on Ray, on this machine or on a cluster; the only module that imports Ray."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from dpaudit import _validate
from dpaudit.errors import DpauditError, InputError, MissingExtraError
from dpaudit.experiments.trials._task import Finished, Task
from dpaudit.experiments.trials._trial_plan import Group

_QUEUED = 4  # tasks per CPU, so that the next one is ready when a task ends
_OBJECT_STORE = 128 * 2**20  # bytes; messages are small, and Ray's default is a third of the memory


@dataclass(frozen=True, kw_only=True)
class Ray:
    """Pool of Ray tasks, one per group.

    Without an ``address``, the tasks run on a local cluster that is shut down after the run. With one, such
    as ``"auto"``, they run on that cluster, whose machines need dpaudit and the module of the training
    function. If this process is already connected to a cluster, that one is used.
    """

    address: str | None = None
    num_cpus: float = 1
    """CPUs per group. A group always trains with one thread, so that scores stay the same."""
    num_gpus: float = 0
    max_retries: int = 3
    """How often a group is retried after its worker or its machine has died."""

    def __post_init__(self) -> None:
        _validate.at_least("num_cpus", self.num_cpus, 0)
        _validate.at_least("num_gpus", self.num_gpus, 0)
        _validate.whole("max_retries", self.max_retries, low=0)

    def map(self, task: Task, groups: Sequence[Group]) -> Iterator[tuple[Group, Finished]]:
        """Yield every group with its result, in order of completion."""
        ray = _imported()
        with _connected(ray, self.address):
            self._require_resources(ray.cluster_resources())
            needs = {"num_cpus": self.num_cpus, "num_gpus": self.num_gpus}
            remote = ray.remote(_call).options(**needs, max_retries=self.max_retries)
            limit = _QUEUED * max(1, int(ray.cluster_resources().get("CPU", 1)))
            yield from _results(ray, remote, task, groups, limit)

    def _require_resources(self, found: Mapping[str, float]) -> None:
        """Raise if the cluster can never run a task, which would otherwise wait forever."""
        for name, needed, kind in (("num_cpus", self.num_cpus, "CPU"), ("num_gpus", self.num_gpus, "GPU")):
            most = found.get(kind, 0)
            if needed > most:
                raise InputError(
                    f"Expected {name}={needed:g} to be at most {most:g}, the number available to Ray."
                )


def _call(task: Task, group: Group) -> tuple[Group, Finished]:
    """Score a group in a Ray worker."""
    return task(group)


def _results(
    ray: Any, remote: Any, task: Task, groups: Sequence[Group], limit: int
) -> Iterator[tuple[Group, Finished]]:
    shared, waiting = ray.put(task), list(reversed(groups))
    running: dict[Any, Group] = {}
    try:
        while waiting or running:
            while waiting and len(running) < limit:
                group = waiting.pop()
                running[remote.remote(shared, group)] = group
            ended, _ = ray.wait(list(running), num_returns=1)
            for reference in ended:
                yield _result(ray, reference, running.pop(reference))
    finally:
        for reference in running:  # leave nothing running on a shared cluster
            ray.cancel(reference, force=True)


def _result(ray: Any, reference: Any, group: Group) -> tuple[Group, Finished]:
    try:
        _, finished = ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, DpauditError):  # would occur for every group
            raise error.cause from error
        return group, Finished.failed(group, str(error))
    except ray.exceptions.RayError as error:
        return group, Finished.failed(group, f"The Ray worker was lost too often: {error}")
    return group, finished


@contextmanager
def _connected(ray: Any, address: str | None) -> Iterator[None]:
    if ray.is_initialized():
        yield
        return
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # no telemetry
    quiet = {"log_to_driver": False, "logging_level": "ERROR"}
    if address is None:
        with _on_loopback(ray):
            own = {"_node_ip_address": "127.0.0.1", "object_store_memory": _OBJECT_STORE}
            ray.init(address="local", include_dashboard=False, **own, **quiet)
    else:
        try:
            ray.init(address=address, **quiet)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise InputError(
                f"Expected a Ray cluster at address={address!r}, but it cannot be reached: {error}"
            ) from error
    try:
        yield
    finally:
        ray.shutdown()


@contextmanager
def _on_loopback(ray: Any) -> Iterator[None]:
    """Start Ray so that only this machine can reach it: anyone who can connect to Ray can run code.

    Ray replaces 127.0.0.1 with the machine's external address, unless clusters are disabled.
    """
    constants = ray._private.ray_constants
    before = constants.ENABLE_RAY_CLUSTER
    constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        constants.ENABLE_RAY_CLUSTER = before


def _imported() -> Any:
    try:
        import ray  # noqa: PLC0415  # optional, and slow to load
        import ray._private.ray_constants  # noqa: PLC0415
        import ray.exceptions  # noqa: PLC0415
    except ImportError as error:
        raise MissingExtraError("Training on Ray", "ray") from error
    return ray
