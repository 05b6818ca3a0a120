"""Pool that runs on Ray, on this machine or on a cluster; the only module that imports Ray.

Ray is driven by a process of its own, because it ends its process with status 1 if it loses its cluster, and
because its helpers are then ended together with that process. ``driver_main`` is its entry point.
"""

from __future__ import annotations

import os
import secrets
import sys
import tempfile
import time
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

    A group whose worker or machine has died is retried on another machine, if there is one. If that does not
    help or the cluster is lost, ``IncompleteError`` is raised. After a signal, the groups in progress are
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
            yield from _RayTasks(ray, self, task, groups).results(lambda: requested() is not None)
            return
        if find_spec("ray") is None:
            raise MissingExtraError("Training on Ray", "ray")
        with tempfile.TemporaryFile() as log:
            try:
                yield from _driven(self, task, groups, log)
            except IncompleteError as error:
                error.__cause__ = error.__cause__ or RuntimeError(f"Ray printed:\n{_tail(log)}")
                raise

    def _require_resources(self, found: Mapping[str, float]) -> None:
        """Raise if the cluster can never run a task, which would otherwise wait forever."""
        for name, needed, kind in (("num_cpus", self.num_cpus, "CPU"), ("num_gpus", self.num_gpus, "GPU")):
            most = found.get(kind, 0)
            if needed > most:
                raise InputError(
                    f"Expected {name}={needed:g} to be at most {most:g}, the number available to Ray."
                )


def _tail(log: BinaryIO, num_bytes: int = 20_000) -> str:
    log.seek(max(0, log.seek(0, os.SEEK_END) - num_bytes))
    return log.read().decode(errors="replace")


def _driven(
    pool: Ray, task: Task, groups: Sequence[Group], log: BinaryIO
) -> Iterator[tuple[Group, Finished]]:
    """Yield the results of a process that drives Ray, whose messages go to ``log``."""
    process, has_ended, is_draining = (
        WorkerProcess(f"{__name__}:driver_main", task.search_path, log),
        False,
        False,
    )
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
                    yield groups[message["number"]], Finished.from_dict(message["finished"])
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
        with _connected(ray, pool.address), channel.reporting(), _noticing_loss(ray):
            numbers = {group[0].number: place for place, group in enumerate(trials)}
            for group, finished in _RayTasks(ray, pool, task, trials).results(_Draining(channel)):
                channel.send({"number": numbers[group[0].number], "finished": finished.to_dict()})
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


class _Draining:
    """Whether the driver's parent has asked it to start no further groups."""

    def __init__(self, channel: WorkerChannel) -> None:
        self._channel, self._is_asked = channel, False

    def __call__(self) -> bool:
        self._is_asked = self._is_asked or self._channel.waiting() is not None
        return self._is_asked


class _RayTasks:
    """Tasks of one ``map`` call on Ray, and the groups of trials that are waiting for them."""

    def __init__(self, ray: Any, pool: Ray, task: Task, groups: Sequence[Group]) -> None:
        pool._require_resources(ray.cluster_resources())
        self._ray, self._pool = ray, pool
        # without retries by Ray itself, which might be on the same machine
        self._options = {"num_cpus": pool.num_cpus, "num_gpus": pool.num_gpus, "max_retries": 0}
        self._function = ray.remote(_call)
        # four tasks per CPU, so that the next one is ready when a task ends
        self._limit = 4 * max(1, int(ray.cluster_resources().get("CPU", 1)))
        self._task, self._waiting = ray.put(task), list(reversed(groups))
        self._running: dict[Any, tuple[Group, str]] = {}
        self._left: dict[int, list[str]] = {}  # nodes on which a group was lost, by its first trial
        self._checked, self._token = time.monotonic(), secrets.token_hex(8)

    def results(self, is_stopping: Callable[[], bool]) -> Iterator[tuple[Group, Finished]]:
        """Keep the cluster busy and yield the results; stop after the groups in progress if asked to."""
        try:
            while self._waiting or self._running:
                if is_stopping():
                    self._cancel_queued()
                self._fill_queue()
                if not self._running:
                    return
                ended, _ = self._ray.wait(list(self._running), num_returns=1, timeout=0.5)
                for reference in ended:
                    yield from self._result(reference)
                if not ended:
                    self._require_alive()
        except IncompleteError:
            self._running.clear()  # there may be no cluster left
            raise
        finally:
            self._cancel_running()

    def _cancel_running(self) -> None:
        """Leave nothing on a shared cluster."""
        for reference, (_, note) in self._running.items():
            self._ray.cancel(reference, force=True)
            _forget(note)

    def _fill_queue(self) -> None:
        while self._waiting and len(self._running) < self._limit:
            self._submit(self._waiting.pop())

    def _submit(self, group: Group) -> None:
        lost_on = self._left.get(group[0].number, [])
        note = f"{self._token}-{group[0].number}-{len(lost_on)}"
        options = dict(self._options)
        if others := [name for name in self._nodes() if name not in lost_on] if lost_on else []:
            strategy = self._ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
            chosen = others[len(lost_on) % len(others)]
            options["scheduling_strategy"] = strategy(node_id=chosen, soft=True)
        self._running[self._function.options(**options).remote(self._task, group, note)] = group, note

    def _nodes(self) -> list[str]:
        """Return the identifiers of the machines that could run a group."""
        return [
            str(node["NodeID"])
            for node in self._ray.nodes()
            if node["Alive"]
            and node["Resources"].get("CPU", 0) >= self._pool.num_cpus
            and node["Resources"].get("GPU", 0) >= self._pool.num_gpus
        ]

    def _result(self, reference: Any) -> Iterator[tuple[Group, Finished]]:
        group, note = self._running.pop(reference)
        try:
            finished = self._ray.get(reference)
            _forget(note)
            yield finished
        except self._ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, IncompleteError):
                self._retry(group, note, str(error.cause))
            elif isinstance(error.cause, DpauditError):  # would occur for every group
                raise error.cause from error
            else:
                raise failed_worker(str(error)) from error
        except self._ray.exceptions.RayError as error:
            self._retry(group, note, str(error) or type(error).__name__)

    def _retry(self, group: Group, note: str, how: str) -> None:
        """Queue a group again whose worker was lost; raise after too many retries."""
        self._require_alive(now=True)
        left = self._left.setdefault(group[0].number, [])
        left.append(_place(note) or "")
        if len(left) > self._pool.max_retries:
            lines = how.strip().splitlines()
            raise IncompleteError(
                f"{named(group)} could not be completed: the Ray worker was lost {len(left)} times in a row, "
                f"at last because of {lines[0].rstrip('.')}."
            )
        self._waiting.append(group)

    def _cancel_queued(self) -> None:
        """Forget the groups that no worker has begun."""
        self._waiting.clear()
        for reference, (_, note) in list(self._running.items()):
            if _place(note) is None:
                self._ray.cancel(reference, force=True)
                del self._running[reference]

    def _require_alive(self, *, now: bool = False) -> None:
        """Raise if the cluster is lost, instead of waiting for it."""
        if not now and time.monotonic() - self._checked < 2.0:
            return
        self._checked = time.monotonic()
        if dead := _dead_process(self._ray):
            raise IncompleteError(f"The Ray cluster was lost: its process {dead} has died.")
        if not any(node["Alive"] for node in self._ray.nodes()):
            raise IncompleteError("The Ray cluster was lost: none of its machines is alive.")


def _call(task: Task, group: Group, note: str) -> tuple[Group, Finished]:
    """Score a group in a Ray worker, after noting where."""
    import ray  # noqa: PLC0415
    from ray.experimental import internal_kv  # noqa: PLC0415

    internal_kv._internal_kv_put(note, ray.get_runtime_context().get_node_id(), namespace="dpaudit")
    return task(group)


def _place(note: str) -> str | None:
    """Return the node on which a task was started; None if it was not."""
    from ray.experimental import internal_kv  # noqa: PLC0415

    node = internal_kv._internal_kv_get(note, namespace="dpaudit")
    return None if node is None else node.decode()


def _forget(note: str) -> None:
    from ray.experimental import internal_kv  # noqa: PLC0415

    internal_kv._internal_kv_del(note, namespace="dpaudit")


@contextmanager
def _connected(ray: Any, address: str | None) -> Iterator[None]:
    if ray.is_initialized():
        yield
        return
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # by default, Ray waits for a minute before it ends a process that has lost its cluster
    os.environ.setdefault("RAY_gcs_rpc_server_reconnect_timeout_s", "20")
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
        import ray.util.scheduling_strategies  # noqa: PLC0415
    except ImportError as error:
        raise MissingExtraError("Training on Ray", "ray") from error
    return ray
