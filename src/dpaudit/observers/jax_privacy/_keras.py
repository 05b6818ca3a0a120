"""``observe_model()`` for the Keras API, whose training step is recompiled with canaries in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import jax_privacy

from dpaudit import _validate
from dpaudit.canaries import GradientCanary, Mixture, fresh_seed
from dpaudit.errors import InputError
from dpaudit.observers._patching import replaced
from dpaudit.observers._session import session
from dpaudit.observers.jax_privacy._clipping import marked, require_unmarked
from dpaudit.observers.jax_privacy._host import Host, StepBarrier, new_checks
from dpaudit.observers.jax_privacy._observer import GradientInsertion, JaxObserver, observed_canaries
from dpaudit.recording import DPSGDParams, LiveBound, ReadClaim, Recorder, TrainingInfo
from dpaudit.recording._claim_source import CLAIM_PARTS

_MIXTURE = Mixture()
_POISSON = ("how batches are drawn is not tested: fit() is assumed to use Poisson sampling, as claimed",)
_NOT_POISSON = (
    "how batches are drawn is not tested: the claim assumes Poisson sampling, but fit() uses the given "
    "batches (with poisson_sampling_in_fit=True, it draws them by Poisson sampling)",
)


@_validate.without_epsilon(CLAIM_PARTS)
@session
def observe_model(
    model: Any,
    *,
    canary: GradientCanary = _MIXTURE,
    num_canaries: int | None = None,
    noise_multiplier: float | None = None,
    sample_rate: float | None = None,
    num_steps: int | None = None,
    delta: float | None = None,
    confidence: float = 0.95,
    tests: bool = True,
    seed: int | None = None,
    every: int | None = None,
    callbacks: Sequence[Callable[[LiveBound], None]] = (),
) -> Iterator[Recorder]:
    """Audit ``model.fit`` inside the ``with`` block.

    ``model`` is the one that ``jax_privacy.keras_api.make_private`` returned. Canaries pass through the
    clipping, sum and noise of its training step, and are subtracted before the optimizer is called. The claim
    is read from the model's configuration unless passed here or to ``audit()``; the other arguments are those
    of :func:`observe`.
    """
    config = _config(model)
    require_unmarked(model.train_step, "model")
    given = DPSGDParams(
        noise_multiplier=noise_multiplier, sample_rate=sample_rate, num_steps=num_steps, delta=delta
    )
    barrier, checks = StepBarrier(), new_checks()
    recorder = Recorder(
        claim=ReadClaim(lambda: _read_params(model, config), given),
        num_steps=num_steps,
        confidence=confidence,
        tests=tests,
        every=every,
        callbacks=callbacks,
        signal=min(canary.scale, 1.0),
        facts=lambda: TrainingInfo(
            canary=canary, max_grad_norm=config.clipping_norm, batch_size=config.effective_batch_size
        ),
        not_covered=_POISSON if config.poisson_sampling_in_fit else _NOT_POISSON,
        checks=checks,
        synchronize=barrier.wait,
        num_canaries=num_canaries,
        canaries=observed_canaries(canary, lambda: insertion),
    )
    host = Host(recorder, None, barrier, checks, num_releases=config.gradient_accumulation_steps)
    insertion = GradientInsertion(host, canary, num_canaries, fresh_seed(seed))
    with _observed(model, JaxObserver(host, insertion)), barrier.own_error():
        yield recorder
        barrier.wait()  # for the last step


def _config(model: Any) -> Any:
    config = getattr(model, "_dp_params", None)
    if config is None:
        raise InputError(
            f"Expected the model that keras_api.make_private returned, got a {type(model).__name__}, which "
            "is not private."
        )
    return config


def _read_params(model: Any, config: Any) -> DPSGDParams:
    return DPSGDParams(
        noise_multiplier=float(model.get_noise_multiplier()),
        sample_rate=config.effective_batch_size / config.train_size,
        delta=config.delta,
        origins=dict.fromkeys(("noise_multiplier", "sample_rate", "delta"), "the model's configuration"),
    )


@contextmanager
def _observed(model: Any, observer: JaxObserver) -> Iterator[None]:
    """Recompile the step with the observer in it, and without it afterwards."""
    train_step = model.train_step

    def observed_step(*args: Any, **kwargs: Any) -> Any:
        with _library_observed(observer):
            return train_step(*args, **kwargs)

    model.train_step, model.train_function = marked(observed_step), None
    try:
        yield
    finally:
        model.train_step, model.train_function = train_step, None


@contextmanager
def _library_observed(observer: JaxObserver) -> Iterator[None]:
    """Replace the functions with which a compiled step creates its gradient function and privatizer."""
    clipped_grad = jax_privacy.clipped_grad
    gaussian_privatizer = jax_privacy.noise_addition.gaussian_privatizer

    def observed_grad(*args: Any, **options: Any) -> Any:
        return observer.gradient(clipped_grad(*args, **options))

    def observed_privatizer(**options: Any) -> Any:
        return observer.privatizer(gaussian_privatizer(**options))

    with ExitStack() as undo:
        for module in (
            jax_privacy,
            jax_privacy.clipping,
        ):  # which of them the step uses depends on the version
            undo.enter_context(replaced(module, "clipped_grad", observed_grad))
        undo.enter_context(replaced(jax_privacy.noise_addition, "gaussian_privatizer", observed_privatizer))
        yield
