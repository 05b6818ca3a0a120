"""Pool that runs on Ray, on this machine or on a cluster; the only module that imports Ray.

Ray is driven by a process of its own, because it ends its process with status 1 if it loses its cluster, and
because its helpers are then ended together with that process. ``driver_main`` is its entry point.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, astuple, dataclass
from importlib.util import find_spec
from typing import Any, BinaryIO

from dpaudit import _validate
from dpaudit._interrupts import requested
from dpaudit.errors import DpauditError, IncompleteError, InputError, MissingExtraError
from dpaudit.experiments.trials._task import Finished, Task, failed_worker, named
from dpaudit.experiments.trials._trial_plan import Group, Recipe, Trial
from dpaudit.experiments.trials._worker import WorkerChannel, WorkerProcess, poll, raise_reported


@dataclass(frozen=True, kw_only=True)
class Ray:
    """Pool of Ray tasks, one per group.

    Without an ``address``, the tasks run on a local cluster that is shut down after the run. With one, such
    as ``"auto"``, they run on that cluster, whose machines need dpaudit and the module of the training
    function. If this process is already connected to a cluster, that one is used.

    Ray retries a group whose worker or machine has died, and spreads groups over its machines. If that does
    not help or the cluster is lost, ``IncompleteError`` is raised. After a signal, the groups in progress are
    finished.
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
        _validate.integer("max_retries", self.max_retries, low=0)

    def map(self, task: Task, groups: Sequence[Group]) -> Iterator[tuple[Group, Finished]]:
        """Yield every group with its result, in order of completion."""
        if sys.modules.get("ray") is not None and (ray := _imported()).is_initialized():
            yield from _results(ray, self, task, groups, lambda: requested() is not None)
            return
        if find_spec("ray") is None:
            raise MissingExtraError("Training on Ray", "ray")
        with tempfile.TemporaryFile() as log:
            try:
                yield from _driven(self, task, groups, log)
            except IncompleteError as error:
                error.__cause__ = error.__cause__ or RuntimeError(f"Ray printed:\n{_tail(log)}")
                raise

    def _options(self) -> dict[str, Any]:
        """Return the options of a task: a retry may be on any machine, not only that of the lost worker."""
        return {
            "num_cpus": self.num_cpus,
            "num_gpus": self.num_gpus,
            "max_retries": self.max_retries,
            "retry_exceptions": [IncompleteError],
            "scheduling_strategy": "SPREAD",
        }

    def _num_slots(self, available: Mapping[str, float]) -> int:
        """Return how many groups run at once; raise if none can ever run, which would wait forever."""
        for name, needed, kind in (("num_cpus", self.num_cpus, "CPU"), ("num_gpus", self.num_gpus, "GPU")):
            most = available.get(kind, 0)
            if needed > most:
                raise InputError(
                    f"{name} must be at most {most:g}, the number available to Ray, got {needed:g}."
                )
        return max(1, int(available.get("CPU", 1) / (self.num_cpus or 1)))


def _tail(log: BinaryIO, num_bytes: int = 20_000) -> str:
    log.seek(max(0, log.seek(0, os.SEEK_END) - num_bytes))
    return log.read().decode(errors="replace")


def _driven(
    pool: Ray, task: Task, groups: Sequence[Group], log: BinaryIO
) -> Iterator[tuple[Group, Finished]]:
    """Yield the results of a process that drives Ray, whose messages go to ``log``."""
    process = WorkerProcess(f"{__name__}:driver_main", task.search_path, log)
    has_ended = is_draining = False
    try:
        plain = [[astuple(trial) for trial in group] for group in groups]
        process.send({"recipe": task.recipe.to_json(), "path": task.search_path, "pool": asdict(pool)})
        process.send({"groups": plain})
        while not has_ended:
            if requested() is not None and not is_draining:
                process.send({"drain": True})
                is_draining = True
            for _, message in poll([process]):
                if message is None:
                    how = process.end(1.0)
                    raise IncompleteError(f"The Ray cluster was lost: the process that drives Ray {how}.")
                if "number" in message:
                    yield groups[message["number"]], Finished(**message["finished"])
                    continue
                has_ended = True
                raise_reported(message)
    finally:
        process.send({"stop": True})
        process.end(3.0 if has_ended else 0.0)  # the time that Ray has to end its processes


def driver_main(descriptor: int) -> None:
    """Run the groups of the process at the other end of this socket on Ray."""
    channel = WorkerChannel(descriptor)
    about, groups = channel.next(), channel.next()["groups"]
    task = Task(Recipe.from_json(about["recipe"]), tuple(about["path"]))
    trials = [tuple(Trial(*values) for values in group) for group in groups]
    pool = Ray(**about["pool"])
    with channel.reporting():
        ray = _imported()
        # reported before Ray is shut down, which may hang
        with _connected(ray, pool), channel.reporting(), _noticing_loss(ray):
            numbers = {group[0].number: place for place, group in enumerate(trials)}
            for group, finished in _results(ray, pool, task, trials, channel.has_request):
                channel.send({"number": numbers[group[0].number], "finished": asdict(finished)})
            channel.send({"end": True})


@contextmanager
def _noticing_loss(ray: Any) -> Iterator[None]:
    """Raise ``IncompleteError`` for whatever Ray raises after it has lost a process of its cluster."""
    try:
        yield
    except DpauditError:
        raise
    except Exception as error:
        if dead := _dead_process(ray):
            raise IncompleteError(f"The Ray cluster was lost: its process {dead} has died.") from error
        raise


def _dead_process(ray: Any) -> str | None:
    """Return the name of a process of the cluster that has died; None for clusters started elsewhere."""
    node = ray._private.worker._global_node
    return None if node is None else next((name for name, _ in node.dead_processes()), None)


def _results(
    ray: Any, pool: Ray, task: Task, groups: Sequence[Group], is_stopping: Callable[[], bool]
) -> Iterator[tuple[Group, Finished]]:
    """Keep the cluster busy and yield the results; stop after the groups in progress if asked to."""
    limit = pool._num_slots(ray.cluster_resources())
    function, shared = ray.remote(**pool._options())(_call), ray.put(task)
    waiting, running = deque(groups), dict[Any, Group]()
    try:
        while waiting or running:
            if is_stopping():
                waiting.clear()
            for _ in range(min(len(waiting), limit - len(running))):
                group = waiting.popleft()
                running[function.remote(shared, group)] = group
            ended, _ = ray.wait(list(running), num_returns=1, timeout=0.5) if running else ([], [])
            for reference in ended:
                yield _result(ray, pool, reference, running.pop(reference))
            if not ended:
                _require_alive(ray)
    except IncompleteError:
        running.clear()  # there may be no cluster left
        raise
    finally:
        for reference in running:  # leave nothing on a shared cluster
            ray.cancel(reference, force=True)


def _call(task: Task, group: Group) -> tuple[Group, Finished]:
    """Score a group in a Ray worker."""
    return task(group)


def _result(ray: Any, pool: Ray, reference: Any, group: Group) -> tuple[Group, Finished]:
    """Return the result of a group; raise if Ray has lost its worker after all retries."""
    try:
        return ray.get(reference)  # type: ignore[no-any-return]
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, DpauditError) and not isinstance(error.cause, IncompleteError):
            raise error.cause from error  # would occur for every group
        if not isinstance(error.cause, IncompleteError):
            raise failed_worker(str(error)) from error
        how, lost = str(error.cause), error
    except ray.exceptions.RayError as error:
        how, lost = str(error).strip() or type(error).__name__, error
    _require_alive(ray)
    raise IncompleteError(
        f"{named(group)} could not be completed: the Ray worker was lost {pool.max_retries + 1} times in a "
        f"row, at last because of {how.splitlines()[0].rstrip('.')}."
    ) from lost


def _require_alive(ray: Any) -> None:
    """Raise if the cluster is lost, instead of waiting for it."""
    if dead := _dead_process(ray):
        raise IncompleteError(f"The Ray cluster was lost: its process {dead} has died.")
    if not any(node["Alive"] for node in ray.nodes()):
        raise IncompleteError("The Ray cluster was lost: none of its machines is alive.")


@contextmanager
def _connected(ray: Any, pool: Ray) -> Iterator[None]:
    if ray.is_initialized():
        yield
        return
    address = pool.address
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # by default, Ray waits for a minute before it ends a process that has lost its cluster
    os.environ.setdefault("RAY_gcs_rpc_server_reconnect_timeout_s", "20")
    # by default, Ray retries forever what it kills because a machine has too little memory
    os.environ.setdefault("RAY_task_oom_retries", str(pool.max_retries))
    quiet = {"log_to_driver": False, "logging_level": "ERROR"}
    if address is None:
        with _on_loopback(ray):
            # messages are small, and Ray's default is a third of the memory
            local = {"_node_ip_address": "127.0.0.1", "object_store_memory": 128 * 2**20}
            try:
                ray.init(address="local", include_dashboard=False, **local, **quiet)
            except Exception as error:
                reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
                raise IncompleteError(
                    f"The Ray cluster was lost: it could not be started ({reason})."
                ) from error
    else:
        try:
            ray.init(address=address, **quiet)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise InputError(f"The Ray cluster at address={address!r} cannot be reached: {error}") from error
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
