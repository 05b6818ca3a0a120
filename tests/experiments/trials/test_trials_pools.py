"""Real processes and a real Ray: the same scores everywhere, whoever is killed."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from trial_runs import finish, plan_of, undisturbed

from dpaudit import IncompleteError, InputError
from dpaudit.errors import MissingExtraError
from dpaudit.experiments.trials import (
    Processes,
    Ray,
    Recipe,
    Serial,
    TrialPlan,
    TrialsRun,
    _ray,
    function_recipe,
    open_store,
    pools,
)
from dpaudit.experiments.trials._task import Finished, Task
from dpaudit.experiments.trials._worker import WorkerProcess

Start = Callable[..., "subprocess.Popen[str]"]


def folder_in(tmp_path: Path, name: str) -> str:
    (tmp_path / name).mkdir()
    return str(tmp_path / name)


@pytest.mark.parametrize("num_workers", [pytest.param(1, marks=pytest.mark.long), 2])
def test_processes_give_the_scores_of_one_after_another(tmp_path: Path, num_workers: int) -> None:
    plan = plan_of("in_company", num_trials=20, group_size=3)
    serial, pool = finish(plan, tmp_path / "serial"), Processes(num_workers=num_workers)
    assert dict(finish(plan, tmp_path / "processes", pool).scores) == dict(serial.scores)


@pytest.mark.long
def test_a_function_that_imports_torch_late_has_seeded_trials_too(tmp_path: Path) -> None:
    recipe = function_recipe("trial_functions:imports_late", data="trial_functions:numbers")
    plan = TrialPlan(recipe=recipe, num_trials=6, seed=1)
    one, two = (finish(plan, tmp_path / str(count), Processes(num_workers=count)) for count in (1, 2))
    assert dict(one.scores) == dict(two.scores)
    assert len(set(one.scores.values())) == 6


@pytest.mark.parametrize("needs", [{"num_gpus": 0.5}, {"num_cpus": 2.5}])
def test_what_no_machine_of_ray_has_is_told_instead_of_waited_for(needs: dict[str, float]) -> None:
    with pytest.raises(
        InputError, match=r"num_.pus must be at most (0|2), the .* available to Ray, got .\.5"
    ):
        Ray(**needs)._num_slots({"CPU": 2.0})


def test_a_killed_worker_is_replaced_and_its_trials_are_tried_again(tmp_path: Path) -> None:
    plan = plan_of("killing", number=4, folder=folder_in(tmp_path, "marks"), times=3, group_size=2)
    run = finish(plan, tmp_path / "run", Processes(num_workers=2))
    assert run.failures == {}
    assert dict(run.scores) == undisturbed(plan, tmp_path)
    assert len(list((tmp_path / "marks").iterdir())) == 3


def test_trials_that_lose_their_worker_too_often_are_not_stored_and_stop_no_other(tmp_path: Path) -> None:
    plan = plan_of("killing", number=4, folder=folder_in(tmp_path, "marks"), times=2, group_size=2)
    killed = r"^Trials 4 to 5 could not .*: the worker process was killed by SIGKILL, 2 times in a row\.$"
    with pytest.raises(IncompleteError, match=killed):
        finish(plan, tmp_path / "run", Processes(num_workers=2, max_retries=1))
    with open_store(tmp_path / "run", plan) as store:
        assert (sorted(store.scores), store.failures) == ([0, 1, 2, 3, 6, 7, 8, 9], {})
    run = finish(plan, tmp_path / "run", Processes(num_workers=2))
    assert dict(run.scores) == undisturbed(plan, tmp_path)
    assert run.num_retried == 0


def test_trials_without_memory_are_tried_again_by_another_worker(tmp_path: Path) -> None:
    plan = plan_of("out_of_memory", number=4, folder=folder_in(tmp_path, "marks"), times=2)
    assert dict(finish(plan, tmp_path / "run", Processes(num_workers=1)).scores) == undisturbed(
        plan, tmp_path
    )
    workers = [path.read_text() for path in (tmp_path / "marks").iterdir()]
    assert len(set(workers)) == len(workers) == 2


def test_what_is_wrong_for_every_trial_ends_processes_with_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="raised FileNotFoundError: no such data"):
        finish(plan_of("no_data"), tmp_path, Processes(num_workers=2))
    with pytest.raises(IncompleteError, match="a worker process ended with status 7 before it was ready, 2 "):
        finish(plan_of("dying_at_import"), tmp_path / "other", Processes(num_workers=1, max_retries=1))


def test_what_a_worker_prints_does_not_go_to_standard_output(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    finish(plan_of("loud", num_trials=2), tmp_path, Processes(num_workers=1))
    assert capfd.readouterr() == ("", "a training that talks\n" * 2)


def line_of(fifo: Path) -> str:
    """The line that somebody writes to a pipe; a minute is waited for it."""
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    ready, _, _ = select.select([reader], [], [], 60)
    assert ready
    with open(reader) as pipe:  # noqa: PTH123
        return pipe.readline()


def interrupted(plan: TrialPlan, folder: Path, start: Start, fifo: Path, number: signal.Signals) -> int:
    """Send a signal to a driver whose worker has begun a trial that never ends; the driver's exit status.

    Returns when driver and worker are gone.
    """
    os.mkfifo(fifo)
    driver = start(plan, folder, num_workers=2)
    worker = os.pidfd_open(int(line_of(fifo)))
    driver.send_signal(number)
    if number == signal.SIGINT:
        assert driver.stderr is not None
        assert "a second signal stops at once" in driver.stderr.readline()
        driver.send_signal(number)
    status = driver.wait(60)
    gone, _, _ = select.select([worker], [], [], 60)
    os.close(worker)
    assert gone
    return status


@pytest.mark.parametrize(
    ("number", "status"),
    [(signal.SIGKILL, -9), (signal.SIGINT, 130), pytest.param(signal.SIGTERM, -15, marks=pytest.mark.long)],
)
def test_a_driver_that_is_killed_or_interrupted_leaves_a_store_to_go_on_from_and_no_worker(
    tmp_path: Path, start: Start, number: signal.Signals, status: int
) -> None:
    fifo, released = tmp_path / "fifo", tmp_path / "released"
    plan = plan_of("waiting", num_trials=12, number=6, fifo=str(fifo), released=str(released))
    assert interrupted(plan, tmp_path / "run", start, fifo, number) == status
    with open_store(tmp_path / "run", plan) as store:
        assert store.remarks == []
        assert 6 not in store.scores
        assert len(set(store.scores) & {0, 1, 2, 3, 4, 5}) >= 5  # begun before it, one by the other worker
    released.touch()
    assert dict(finish(plan, tmp_path / "run", Serial()).scores) == undisturbed(plan, tmp_path)


def cluster_without(*dead: str) -> Any:
    """Stand in for Ray that cannot start, with processes that have died."""
    node = SimpleNamespace(dead_processes=lambda: [(name, None) for name in dead])

    def init(**_: object) -> None:
        raise RuntimeError("The current node timed out during startup.\nSee the logs.")

    return SimpleNamespace(
        is_initialized=lambda: False,
        init=init,
        _private=SimpleNamespace(
            worker=SimpleNamespace(_global_node=node),
            ray_constants=SimpleNamespace(ENABLE_RAY_CLUSTER=True),
        ),
    )


def test_a_cluster_that_cannot_start_or_loses_a_process_is_no_bug_of_dpaudit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    environment: dict[str, str] = {}
    monkeypatch.setattr(os, "environ", environment)
    timed_out = (
        r"^The Ray cluster was lost: it could not be started \(The current node timed out during startup\)\.$"
    )
    with (
        pytest.raises(IncompleteError, match=timed_out),
        _ray._connected(cluster_without(), Ray(max_retries=2)),
    ):
        pass
    assert environment["RAY_task_oom_retries"] == "2"  # otherwise without end
    died = r"^The Ray cluster was lost: its process raylet has died\.$"
    with pytest.raises(IncompleteError, match=died), _ray._noticing_loss(cluster_without("raylet")):
        raise OSError("Broken pipe")
    with pytest.raises(OSError, match="Broken pipe"), _ray._noticing_loss(cluster_without()):
        raise OSError("Broken pipe")
    with pytest.raises(InputError), _ray._noticing_loss(cluster_without("raylet")):
        raise InputError("num_cpus must be at most 2, got 9.")


def test_what_a_dead_worker_has_started_ends_with_it() -> None:
    worker = WorkerProcess("dying_worker:main", [str(Path(__file__).parent), *sys.path])
    message = worker.receive()
    assert message is not None
    left = os.pidfd_open(message["left"])
    while worker.receive() is not None or not worker.is_dead:
        pass  # until it is gone, as a driver of Ray that has lost its cluster
    assert worker.end(0.0) == "ended with status 1"
    gone, _, _ = select.select([left], [], [], 60)
    if not gone:
        signal.pidfd_send_signal(left, signal.SIGKILL)
    os.close(left)
    assert gone


def test_processes_begin_no_further_groups_after_a_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    class Worker:
        """A worker without a process, which ends a group as soon as it gets it."""

        def __init__(self, *_: object) -> None:
            self.replies: list[dict[str, Any]] = []

        def send(self, message: dict[str, Any]) -> None:
            if "recipe" in message:
                self.replies.append({"ready": True})
            if "group" in message:
                self.replies.append(asdict(Finished(scores=(0.5,), errors=(None,))))

        def end(self, _: float) -> str:
            return "ended"

    def poll(workers: Sequence[Worker]) -> list[tuple[Worker, dict[str, Any]]]:
        return [(worker, worker.replies.pop(0)) for worker in workers if worker.replies]

    ended: list[Any] = []
    monkeypatch.setattr(pools, "WorkerProcess", Worker)
    monkeypatch.setattr(pools, "poll", poll)
    monkeypatch.setattr(pools, "requested", lambda: signal.SIGTERM if ended else None)
    plan = plan_of(num_trials=10)
    for result in Processes(num_workers=2).map(Task.of(plan.recipe), plan.groups_without({})):
        ended.append(result)  # noqa: PERF402  # one by one: the signal arrives after the first
    assert len(ended) == 2  # the other worker has begun its first group


def descendants(process: int) -> list[int]:
    lists = [path.read_text().split() for path in Path(f"/proc/{process}/task").glob("*/children")]
    children = [int(number) for numbers in lists for number in numbers]
    return children + [one for child in children for one in descendants(child)]


def listening() -> set[str]:
    """The addresses at which what this process started listens."""
    sockets = {
        str(link.readlink())[len("socket:[") : -1]
        for process in descendants(os.getpid())
        for link in Path(f"/proc/{process}/fd").glob("*")
        if link.is_symlink() and str(link.readlink()).startswith("socket:")
    }
    found = set()
    for family, name in ((socket.AF_INET, "tcp"), (socket.AF_INET6, "tcp6")):
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            local, state, inode = (line.split()[place] for place in (1, 3, 9))
            if state == "0A" and inode in sockets:
                words = struct.unpack(f"<{len(local[:-5]) // 8}I", bytes.fromhex(local[:-5]))
                found.add(socket.inet_ntop(family, struct.pack(f">{len(words)}I", *words)))
    return found


def ray_runs(tmp_path: Path) -> dict[str, TrialsRun]:
    """Everything that is asked of Ray, in one cluster: it takes long to start."""
    ray = pytest.importorskip("ray")
    marks = folder_in(tmp_path, "marks")
    plans = {
        "company": plan_of("in_company", num_trials=20, group_size=3),
        "killing": plan_of("killing", number=4, folder=marks, times=2, group_size=2),
        "failing": plan_of("failing", numbers=[3]),
        "memory": plan_of("out_of_memory", number=4, folder=folder_in(tmp_path, "notes"), times=2),
    }
    with _ray._connected(ray, Ray()):
        assert ray.util.get_node_ip_address() == "127.0.0.1"
        assert "::ffff:127.0.0.1" in listening() <= {"127.0.0.1", "::ffff:127.0.0.1", "::1"}
        runs = {name: finish(plan, tmp_path / name, Ray()) for name, plan in plans.items()}
        assert ray.is_initialized()  # somebody else's cluster is not ended
        short = plan_of("killing", number=4, folder=folder_in(tmp_path, "more"), times=9)
        with pytest.raises(IncompleteError, match=r"^Trial 4 could not .* the Ray worker was lost 2 times"):
            finish(short, tmp_path / "short", Ray(max_retries=1))
        with open_store(tmp_path / "short", short) as store:
            assert store.failures == {}
        with pytest.raises(InputError, match="raised FileNotFoundError: no such data"):
            finish(plan_of("no_data"), tmp_path / "refused", Ray())
    assert not ray.is_initialized()
    return runs


def test_ray_gives_the_same_scores_and_tries_again_what_was_killed(tmp_path: Path) -> None:
    runs = ray_runs(tmp_path)
    company = finish(plan_of("in_company", num_trials=20, group_size=3), tmp_path / "serial")
    assert dict(runs["company"].scores) == dict(company.scores)
    assert runs["killing"].failures == {}
    assert dict(runs["killing"].scores) == undisturbed(plan_of(), tmp_path)
    assert len(list((tmp_path / "marks").iterdir())) == 2
    assert dict(runs["memory"].scores) == dict(runs["killing"].scores)
    assert list(runs["failing"].failures) == [3]
    assert "this training diverged" in runs["failing"].failures[3]


def test_without_ray_the_line_that_installs_it_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingExtraError, match=r"pip install ray"):
        finish(plan_of(), tmp_path, Ray())


@pytest.mark.parametrize(
    ("pool", "options"),
    [(Processes, {"num_workers": 0}), (Processes, {"max_retries": -1}), (Ray, {"num_gpus": -1})],
)
def test_a_pool_of_nothing_is_refused(pool: Callable[..., object], options: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=next(iter(options))):
        pool(**options)


def test_a_worker_ends_when_its_driver_dies_with_a_reply_unread() -> None:
    ours, its = socket.socketpair()
    code = f"from dpaudit.experiments.trials.pools import worker_main; worker_main({its.fileno()})"
    worker = subprocess.Popen(
        [sys.executable, "-c", code],
        pass_fds=[its.fileno()],
        process_group=0,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    its.close()
    recipe = Recipe(target="trial_functions:plain").to_json()
    ours.sendall(json.dumps({"recipe": recipe}).encode() + b"\n")
    assert select.select([ours], [], [], 60)[0]  # a reply, which resets the connection if it is not read
    ours.close()
    try:
        assert worker.wait(timeout=60) != 0
    finally:
        worker.kill()
