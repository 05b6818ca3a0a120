"""Results and recorders show and draw themselves."""

from __future__ import annotations

import sys
from dataclasses import replace
from html import escape

import numpy as np
import pytest

import dpaudit
from dpaudit.errors import InputError, MissingExtraError
from dpaudit.recording import PerStep
from dpaudit.stats._block import Block

CLAIM = dpaudit.Claim.gaussian(noise_multiplier=1.0, delta=1e-5)


@pytest.fixture(autouse=True)
def without_a_window(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPLBACKEND", "agg")


def a_result() -> dpaudit.Result:
    rng = np.random.default_rng(0)
    seen = dpaudit.Observations(
        with_canary=rng.normal(1, 0.5, 200), without_canary=rng.normal(0, 0.5, 200), normalized=True
    )
    return dpaudit.audit(seen, claim=CLAIM)


def a_recorder(num_done: int, num_steps: int = 30, *, paired: bool = False) -> dpaudit.Recorder:
    made, rng = (
        dpaudit.Recorder(claim=CLAIM, num_steps=num_steps, scorer=PerStep(paired=paired)),
        np.random.default_rng(0),
    )
    for _ in range(num_done):
        present = np.array([False, True]) if paired else rng.random(2) < 0.5
        made.record(present + 0.5 * rng.standard_normal(2), present)
    return made


def test_a_result_shows_all_that_it_prints() -> None:
    result = a_result()
    shown = result._repr_html_()
    block = Block.of(result.to_dict())
    assert "prefers-color-scheme: dark" in shown.partition("</style>")[0]
    assert shown.endswith(f"{block.html()}</div>")
    assert f'<div class="dpaudit violation"><p class="word"><span aria-hidden="true">{block.mark}' in shown
    assert f" {block.title}</p>" in shown
    assert all(escape(text) in shown for _, text in block.rows)


def test_a_recorder_shows_the_bound_of_a_finished_run() -> None:
    shown = a_recorder(30)._repr_html_()
    assert "epsilon &gt;= " in shown
    assert "<dd>30</dd>" in shown
    assert "one Gaussian step" in a_recorder(0)._repr_html_()


def test_a_running_recorder_shows_its_bound_only_to_who_has_asked_for_it() -> None:
    running = a_recorder(20, paired=True)
    shown = running._repr_html_()
    assert "epsilon &gt;= " not in shown
    assert "live() shows it" in shown
    assert "<dd>20</dd>" in shown
    running.live()
    assert "epsilon &gt;= " in running._repr_html_()


def test_showing_a_finished_recorder_does_not_change_its_verdict() -> None:
    seen, unseen = a_recorder(30, paired=True), a_recorder(30, paired=True)
    seen._repr_html_()
    seen.trajectory()
    seen.live()
    seen.curve()
    assert replace(seen.audit(), times=None).to_dict() == replace(unseen.audit(), times=None).to_dict()


def test_a_recorder_draws_its_bound_beside_the_claim() -> None:
    matplotlib = pytest.importorskip("matplotlib.pyplot")
    ax = a_recorder(30).plot()
    assert ax.get_xlabel() == "training steps"
    assert ax.get_ylim()[1] > CLAIM.epsilon
    matplotlib.close(ax.figure)
    with pytest.raises(InputError, match="No step was recorded"):
        a_recorder(0).plot()


def test_without_matplotlib_the_line_that_installs_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # as if it were not installed
    with pytest.raises(MissingExtraError, match=r"pip install matplotlib"):
        a_result().plot()
