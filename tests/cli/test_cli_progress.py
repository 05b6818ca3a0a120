"""What is told of a training while it runs."""

from __future__ import annotations

import pytest

from dpaudit.cli._console import ProgressDisplay
from dpaudit.experiments import Progress


def told(
    display: ProgressDisplay, page: pytest.CaptureFixture[str], *, start: float, pace: float
) -> list[str]:
    """The lines of a training of 1,000 steps: the seconds until the first has ended, and of each more."""
    display(Progress(num_done=0, num_steps=1000, num_new=0, seconds=0.0, live=None))
    for done in range(1, 1001):
        seconds = start + pace * (done - 1)
        display(Progress(num_done=done, num_steps=1000, num_new=done, seconds=seconds, live=None))
    return page.readouterr().err.splitlines()


def test_the_time_that_the_first_step_takes_is_not_in_the_speed(capsys: pytest.CaptureFixture[str]) -> None:
    lines = told(ProgressDisplay(), capsys, start=2.0, pace=0.004)
    assert lines[0] == "step 0 of 1,000"
    assert lines[1] == "step 100 of 1,000, 250 steps/s, 4 s left"
    assert lines[-1] == "step 1,000 of 1,000, 250 steps/s, 0 s left"
    assert len(lines) == 11


def test_the_speed_of_a_second_training_is_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    display = ProgressDisplay()
    told(display, capsys, start=2.0, pace=0.004)
    lines = told(display, capsys, start=3.0, pace=0.1)
    assert lines[:2] == ["step 0 of 1,000", "step 100 of 1,000, 10 steps/s, 1 min 30 s left"]
    assert len(lines) == 11


def test_a_run_that_goes_on_counts_only_its_new_steps(capsys: pytest.CaptureFixture[str]) -> None:
    display = ProgressDisplay()
    for new in range(101):
        display(Progress(num_done=900 + new, num_steps=1000, num_new=new, seconds=5.0 + new / 2, live=None))
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["step 900 of 1,000", "step 1,000 of 1,000, 2 steps/s, 0 s left"]


def test_the_speed_is_that_of_the_newest_steps(capsys: pytest.CaptureFixture[str]) -> None:
    display, seconds = ProgressDisplay(), 0.0
    for done in range(1, 1001):
        seconds += 1.0 if done <= 500 else 0.01
        display(Progress(num_done=done, num_steps=1000, num_new=done, seconds=seconds, live=None))
    lines = capsys.readouterr().err.splitlines()
    assert "step 500 of 1,000, 1 steps/s, 8 min 20 s left" in lines
    assert "step 700 of 1,000, 100 steps/s, 3 s left" in lines
