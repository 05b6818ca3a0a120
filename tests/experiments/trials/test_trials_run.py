"""Which trials there are, how they fail, and what is told of them."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from trial_functions import score
from trial_runs import finish, plan_of, undisturbed

from dpaudit import IncompleteError, InputError
from dpaudit.experiments import trials
from dpaudit.experiments.trials import (
    Finished,
    Group,
    Recipe,
    Serial,
    Task,
    TrialPlan,
    TrialProgress,
    function_recipe,
    log_odds,
    open_store,
    run_trials,
)
from dpaudit.experiments.trials._task import perform


def test_trials_are_told_by_the_seed_of_the_run_and_their_number() -> None:
    first, again, other = (TrialPlan(recipe=Recipe(target="a:b"), num_trials=50, seed=s) for s in (1, 1, 2))
    assert first.trials == again.trials
    assert len({trial.seed for plan in (first, other) for trial in plan.trials}) == 100
    assert max(trial.seed for trial in first.trials).bit_length() > 120
    assert [trial.present for trial in first.trials] == [False, True] * 25


def test_observations_are_in_the_order_of_the_trials(tmp_path: Path) -> None:
    class Backwards:
        def map(self, task: Task, groups: Sequence[Group]) -> Iterator[tuple[Group, Finished]]:
            return map(task, reversed(groups))

    plan = plan_of()
    observations = finish(plan, tmp_path, Backwards()).observations
    assert observations is not None
    np.testing.assert_array_equal(observations.with_canary, [score(t) for t in plan.trials[1::2]])
    np.testing.assert_array_equal(observations.without_canary, [score(t) for t in plan.trials[::2]])


def test_the_results_of_a_pool_are_closed_however_the_run_ends(tmp_path: Path) -> None:
    closed: list[str] = []

    class Results(map):  # type: ignore[type-arg]  # not a generator, which Python closes by itself
        def close(self) -> None:
            closed.append("once")

    class Closable:
        def map(self, task: Task, groups: Sequence[Group]) -> Iterator[tuple[Group, Finished]]:
            return Results(task, groups)

    finish(plan_of(), tmp_path / "whole", Closable())
    with pytest.raises(IncompleteError):
        finish(plan_of("without", fault="disk", number=4, folder=str(tmp_path)), tmp_path / "run", Closable())
    assert closed == ["once", "once"]


def test_anything_with_a_map_is_a_pool(tmp_path: Path) -> None:
    plan = plan_of()
    with ThreadPoolExecutor(2) as executor:
        assert dict(finish(plan, tmp_path / "threads", executor).scores) == undisturbed(plan, tmp_path)


def test_trials_in_threads_leave_the_process_as_it_was(tmp_path: Path) -> None:
    plan, before = function_plan("forgets_its_seed"), (sys.stdout, dict(os.environ))
    with ThreadPoolExecutor(4) as executor:
        threads = finish(plan, tmp_path / "threads", executor)
    assert dict(threads.scores) == dict(finish(plan, tmp_path / "serial").scores)
    assert (sys.stdout, dict(os.environ)) == before


def test_a_pool_that_loses_a_group_is_told(tmp_path: Path) -> None:
    class Careless:
        def map(self, task: Task, groups: Sequence[Group]) -> Iterator[tuple[Group, Finished]]:
            return map(task, groups[1:])

    with pytest.raises(InputError, match="The pool did not return 1 of its groups"):
        finish(plan_of(), tmp_path, Careless())


class Stop(Exception):  # noqa: N818
    """Stands for a power failure."""


def stop_at(number: int) -> Any:
    def watch(progress: TrialProgress) -> None:
        if progress.num_done >= number:
            raise Stop

    return watch


def test_a_group_that_was_broken_is_computed_in_the_same_company(tmp_path: Path) -> None:
    plan = plan_of("in_company", num_trials=14, group_size=4)
    whole = finish(plan, tmp_path / "whole")
    with open_store(tmp_path / "run", plan) as store, pytest.raises(Stop):
        run_trials(plan, pool=Serial(), store=store, watch=stop_at(8))
    path = tmp_path / "run" / "trials.jsonl"
    rows = path.read_text().splitlines(keepends=True)
    path.write_text("".join(row for place, row in enumerate(rows) if place not in (2, 7)))
    seen: list[TrialProgress] = []
    with open_store(tmp_path / "run", plan) as store:
        assert sorted(store.scores) == [0, 2, 3, 4, 5, 7]
        run = run_trials(plan, pool=Serial(), store=store, watch=seen.append)
    assert dict(run.scores) == dict(whole.scores)
    assert [progress.num_left for progress in seen] == [14, 10, 6, 2, 0]
    assert [progress.num_done for progress in seen] == [6, 7, 8, 12, 14]


def test_progress_tells_speed_time_left_and_observations(tmp_path: Path) -> None:
    seen: list[TrialProgress] = []
    plan = plan_of(num_trials=4)
    with open_store(tmp_path, plan) as store:
        run_trials(plan, pool=Serial(), store=store, watch=lambda p: seen.append((p, p.observations)[0]))
        observed = seen[-1].observations
    assert seen[0].models_per_second is seen[0].seconds_left is None
    assert seen[-1].models_per_second == 4 / seen[-1].seconds
    assert seen[-1].seconds_left == 0
    assert seen[2].seconds_left == pytest.approx(seen[2].seconds)
    assert observed is not None
    assert len(observed.with_canary) == len(observed.without_canary) == 2


def test_a_trial_that_fails_is_recorded_stops_no_other_and_is_tried_again_on_request(tmp_path: Path) -> None:
    healed = tmp_path / "healed"
    plan = plan_of("failing", numbers=[2, 5], healed=str(healed))
    run = finish(plan, tmp_path / "run")
    assert sorted(run.failures) == [2, 5]
    assert "Traceback" in run.failures[2]
    observations = run.observations  # a failure never helps the audit
    assert observations is not None
    assert observations.without_canary[1] > max(run.scores.values())
    assert observations.with_canary[2] < min(run.scores.values())
    assert run.failure_summary == (
        "2 of 10 trials failed, the first of them trial 2: ZeroDivisionError: this training diverged. Failed "
        "trials count against the audit; use --retry-failed to repeat them."
    )
    healed.touch()
    assert finish(plan, tmp_path / "run") == run
    run = finish(plan, tmp_path / "run", retry_failed=True)
    assert run.failures == {}
    assert run.num_retried == finish(plan, tmp_path / "run").num_retried == 2
    assert run.failure_summary is None
    assert dict(run.scores) == undisturbed(plan, tmp_path)


def test_a_failure_beside_a_model_that_diverged_leaves_finite_observations(tmp_path: Path) -> None:
    run = finish(plan_of("extreme", num_trials=6, group_size=1), tmp_path)
    assert sorted(run.failures) == [2, 5]
    observations = run.observations
    assert observations is not None
    assert observations.with_canary.min() == min(run.scores.values())
    assert observations.without_canary.max() == max(run.scores.values())


def test_without_any_score_there_are_no_observations(tmp_path: Path) -> None:
    run = finish(plan_of("failing", numbers=list(range(10))), tmp_path)
    assert run.observations is None
    assert len(run.failures) == 10


def test_a_group_that_raises_fails_as_a_whole(tmp_path: Path) -> None:
    assert sorted(finish(plan_of("failing", group_size=4, numbers=[5]), tmp_path).failures) == [4, 5, 6, 7]


def test_only_finite_scores_count(tmp_path: Path) -> None:
    run = finish(plan_of("odd_scores", num_trials=6, group_size=6), tmp_path)
    assert run.failures == {0: "The score must be finite, got nan.", 1: "The score must be finite, got inf."}
    assert dict(run.scores) == {2: 0.0, 3: 3.0, 4: 0.5, 5: 0.5}
    again = finish(plan_of("odd_scores", num_trials=6, group_size=6), tmp_path)
    assert (again.remarks, dict(again.scores)) == ((), dict(run.scores))


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("too_few", "Each of 2 trials needs one score, got 1"),
        ("leaving", "SystemExit: a training that thinks it is a program"),
        ("offline", "Connection refused"),  # by another machine: this one is not at fault
    ],
)
def test_a_scorer_that_misbehaves_is_a_failed_trial(tmp_path: Path, name: str, reason: str) -> None:
    run = finish(plan_of(name, num_trials=2, group_size=2), tmp_path)
    assert all(reason in error for error in run.failures.values())
    assert len(run.failures) == 2


@pytest.mark.parametrize(
    ("target", "sentence"),
    [
        ("nothing", "A function is named as 'module:function', got 'nothing'"),
        ("no_such:function", "module no_such is neither in "),
        ("trial_functions:missing", r"no missing in .*trial_functions.py"),
        ("trial_functions:no_function", r"no_function is not a function in .*trial_functions.py"),
        ("trial_functions:no_data", "'trial_functions:no_data' must return a scorer, but it raised"),
        ("math:sqrt", r"'math:sqrt' must return a scorer, but it raised TypeError: math\.sqrt\(\)"),
        ("builtins:list", r"'builtins:list' must return a scorer, a function of trials, got \[\]"),
        ("broken_module:f", "its module broken_module raised RuntimeError: half written"),
        ("needy_module:f", "its module needy_module needs no_such_package"),
    ],
)
def test_a_target_that_makes_no_scorer_is_told_in_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str, sentence: str
) -> None:
    (tmp_path / "broken_module.py").write_text("raise RuntimeError('half written')\n")
    (tmp_path / "needy_module.py").write_text("import no_such_package\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", list(trials._task.sys.path))
    plan = TrialPlan(recipe=Recipe(target=target), num_trials=2, seed=1)
    with pytest.raises(InputError, match=sentence):
        finish(plan, tmp_path)


@pytest.mark.parametrize("arguments", [{"a": {1: 2}}, {"a": (1, 2)}, {"a": object()}, {"a": float("nan")}])
def test_arguments_are_plain_values(arguments: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="arguments must be"):
        Recipe(target="a:b", arguments=arguments)


def function_plan(name: str, **options: Any) -> TrialPlan:
    recipe = function_recipe(f"trial_functions:{name}", data="trial_functions:numbers", **options)
    return TrialPlan(recipe=recipe, num_trials=6, seed=1)


def test_a_training_function_of_the_current_directory_gets_data_with_or_without_the_canary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_training.py").write_text(
        "def train(dataset, seed):\n    return len(dataset) + seed / 2**32\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", list(trials._task.sys.path))
    recipe = function_recipe("my_training:train", data="trial_functions:numbers", data_arguments={"size": 5})
    run = finish(TrialPlan(recipe=recipe, num_trials=6, seed=1), tmp_path)
    assert [int(value) for value in run.scores.values()] == [5, 6] * 3
    assert len({value % 1 for value in run.scores.values()}) == 6


def test_a_function_that_forgets_its_seed_still_depends_on_its_trial_alone(tmp_path: Path) -> None:
    plan = function_plan("forgets_its_seed")
    state = np.random.get_state()[1].tolist()  # type: ignore[index]  # noqa: NPY002
    first = finish(plan, tmp_path / "first")
    assert np.random.get_state()[1].tolist() == state  # type: ignore[index]  # noqa: NPY002
    assert len(set(first.scores.values())) == 6
    np.random.normal()  # noqa: NPY002
    assert dict(finish(plan, tmp_path / "again").scores) == dict(first.scores)


def test_a_model_is_asked_for_the_log_odds_of_the_canary_or_by_a_function_of_the_user(tmp_path: Path) -> None:
    slopes = finish(function_plan("noisy_mean"), tmp_path / "score").scores
    models = finish(function_plan("noisy_model"), tmp_path / "model").scores
    doubled = finish(function_plan("noisy_model", score="trial_functions:product"), tmp_path / "own").scores
    assert dict(models) == pytest.approx(dict(slopes))
    assert dict(doubled) == pytest.approx({number: 2 * slope for number, slope in slopes.items()})


def test_a_function_that_returns_nothing_is_told_so(tmp_path: Path) -> None:
    summary = finish(function_plan("nothing"), tmp_path).failure_summary
    assert summary is not None
    assert "'trial_functions:nothing' must return a score or a model, got NoneType" in summary


def test_log_odds_are_those_of_the_probability_and_finite_where_it_is_one() -> None:
    logits = np.array([0.3, -1.2, 2.0])
    p = np.exp(logits) / np.exp(logits).sum()
    for label in range(3):
        found = log_odds(lambda batch: logits[None].repeat(len(batch), axis=0), [0.0], label)
        assert found == pytest.approx(np.log(p[label] / (1 - p[label])))
    assert log_odds(lambda _: [[1000.0, 0.0]], [0.0], 0) == 1000.0
    with pytest.raises(InputError, match="one logit for each class"):
        log_odds(lambda _: [[1.0]], [0.0], 0)


@pytest.mark.parametrize("number", [4, 9])  # the last one, too
def test_a_signal_ends_the_trials_after_the_current_one_and_the_next_call_goes_on(
    number: int, tmp_path: Path, received: list[int]
) -> None:
    plan = plan_of("signalling", number=number, folder=str(tmp_path))
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt):
        finish(plan, tmp_path / "run")
    assert received == [signal.SIGTERM]
    with open_store(tmp_path / "run", plan) as store:
        assert sorted(store.scores) == list(range(number + 1))
    assert signal.getsignal(signal.SIGTERM) is before
    assert dict(finish(plan, tmp_path / "run").scores) == undisturbed(plan, tmp_path)


@pytest.mark.parametrize("fault", ["memory", "disk"])
def test_a_fault_of_the_machine_is_not_stored_and_the_next_call_goes_on(tmp_path: Path, fault: str) -> None:
    plan = plan_of("without", fault=fault, number=4, folder=str(tmp_path))
    with pytest.raises(IncompleteError, match=r"^Trial 4 could not be trained: "):
        finish(plan, tmp_path / "run")
    with open_store(tmp_path / "run", plan) as store:
        assert (sorted(store.scores), store.failures) == ([0, 1, 2, 3], {})
    assert dict(finish(plan, tmp_path / "run").scores) == undisturbed(plan, tmp_path)


def test_a_pool_that_is_broken_ends_the_run_and_stores_nothing_wrong(tmp_path: Path) -> None:
    class Broken:
        def map(self, task: Task, groups: Sequence[Group]) -> Iterator[tuple[Group, Finished]]:
            yield task(groups[0])
            raise BrokenProcessPool("A process in the process pool was terminated abruptly")

    with pytest.raises(IncompleteError, match=r"^The workers of the pool were lost: A process"):
        finish(plan_of(), tmp_path, Broken())
    with open_store(tmp_path, plan_of()) as store:
        assert (sorted(store.scores), store.failures) == ([0], {})


def test_a_bug_in_code_without_any_of_the_user_is_no_failed_training() -> None:
    def broken(_: object) -> list[float]:
        raise ZeroDivisionError

    group = plan_of().trials[:1]
    assert perform(broken, group).errors[0] is not None
    with pytest.raises(ZeroDivisionError):
        perform(broken, group, is_own=True)


def test_a_removed_lock_is_noticed_before_the_next_trial_is_stored(tmp_path: Path) -> None:
    def remove(progress: TrialProgress) -> None:
        if progress.num_done == 3:
            (tmp_path / ".lock").unlink()

    with (
        pytest.raises(IncompleteError, match=r"The lock .*\.lock was removed or replaced"),
        open_store(tmp_path, plan_of()) as store,
    ):
        run_trials(plan_of(), pool=Serial(), store=store, watch=remove)
    with open_store(tmp_path, plan_of()) as store:
        assert sorted(store.scores) == [0, 1, 2]
