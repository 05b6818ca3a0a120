"""``observe_model()`` for the Keras API, whose training step is recompiled with canaries in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType, MethodType, ModuleType
from typing import Any, Unpack

import jax_privacy

from dpaudit.canaries import GradientCanary
from dpaudit.errors import InputError
from dpaudit.observers._session import MIXTURE, AuditedSteps, AuditOptions, observer, session
from dpaudit.observers.jax_privacy._canaries import GradientInsertion
from dpaudit.observers.jax_privacy._clipping import marked, require_unmarked
from dpaudit.observers.jax_privacy._observe import JaxObserver
from dpaudit.observers.jax_privacy._step_callbacks import StepBarrier, StepCallbacks, observed_batches
from dpaudit.recording import DPSGDParams, Recorder, TrainingInfo


@observer
@session
def observe_model(
    model: Any,
    *,
    canary: GradientCanary = MIXTURE,
    num_canaries: int | None = None,
    **options: Unpack[AuditOptions],
) -> Iterator[Recorder]:
    """Audit ``model.fit`` inside the ``with`` block.

    Canaries pass through the clipping, sum and noise of the training step, and are subtracted before the
    optimizer is called.

    Args:
        model: What ``jax_privacy.keras_api.make_private`` returned.
        canary: The kind of canary.
        num_canaries: Their number, by default as many as fit.
        options: :class:`AuditOptions`; the claim is read from the model's configuration unless passed.

    Returns:
        A session, whose ``with`` block gives the recorder.

    Raises:
        InputError: The model is not private, or already observed.

    Example:
        ``with observe_model(model, claim=claim) as recorder: model.fit(x, y)``

    """
    config = _config(model)
    require_unmarked(model.train_step, "model")
    barrier = StepBarrier()
    drawn = (
        " (poisson_sampling_in_fit=True is set)"
        if config.poisson_sampling_in_fit
        else " (the claim assumes Poisson sampling, but fit() uses the given batches unless "
        "poisson_sampling_in_fit=True)"
    )
    audited = AuditedSteps(
        canary,
        num_canaries,
        lambda: _read_params(model, config),
        batches=observed_batches(drawn=drawn),
        facts=lambda: TrainingInfo(
            canary=canary, max_grad_norm=config.clipping_norm, batch_size=config.effective_batch_size
        ),
        synchronize=barrier.wait,
        **options,
    )
    callbacks = StepCallbacks(audited, barrier, num_releases=config.gradient_accumulation_steps)
    with (
        _observed(model, JaxObserver(callbacks, GradientInsertion(callbacks, canary))),
        barrier.own_error(),
    ):
        yield audited.steps.recorder
        barrier.wait()  # for the last step
        callbacks.end([variable.value for variable in model.trainable_variables])


def _config(model: Any) -> Any:
    config = getattr(model, "_dp_params", None)
    if config is None:
        raise InputError(
            f"A {type(model).__name__} is not private; pass the model that keras_api.make_private returned."
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
def _observed(model: Any, wrap: JaxObserver) -> Iterator[None]:
    """Recompile the step with the observer in it, and without it afterwards."""
    train_step = model.train_step
    model.train_step, model.train_function = (
        MethodType(marked(_observed_step(train_step, wrap)), model),
        None,
    )
    try:
        yield
    finally:
        model.train_step, model.train_function = train_step, None


def _observed_step(train_step: Any, wrap: JaxObserver) -> FunctionType:
    """Return the library's training step with its gradient function and its privatizer observed.

    It is a copy for one model: it and the functions that it calls look names up in a copy of the variables of
    their module, where the library is replaced by a view of it. The library itself does not change.
    """
    step = getattr(train_step, "__func__", None)
    if not isinstance(step, FunctionType) or step.__globals__["__name__"] != "jax_privacy.keras_api":
        raise InputError(
            "The model's train_step is not the one that keras_api.make_private gave it; pass the model as "
            "it was returned, and replace its train_step inside the with block."
        )
    observed = {"clipped_grad": wrap.gradient, "gaussian_privatizer": wrap.privatizer}
    guarded = {name: wrap.steps.guarded(function) for name, function in observed.items()}
    view = _LibraryView(jax_privacy, guarded)
    variables = {name: view.seen(name, value) for name, value in step.__globals__.items()}
    for name, value in variables.items():
        if isinstance(value, FunctionType) and value.__globals__ is step.__globals__:
            variables[name] = _with_globals(value, variables)
    return _with_globals(step, variables)


def _with_globals(function: FunctionType, variables: dict[str, Any]) -> FunctionType:
    """Return the same function, which looks names up in other variables."""
    copy = FunctionType(
        function.__code__, variables, function.__name__, function.__defaults__, function.__closure__
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


class _LibraryView:
    """The library or a module of it, in which some functions return what is then ``observed``."""

    def __init__(self, module: ModuleType, observed: dict[str, Callable[[Any], Any]]) -> None:
        self._module, self._observed = module, observed

    def __getattr__(self, name: str) -> Any:
        return self.seen(name, getattr(self._module, name))

    def seen(self, name: str, value: Any) -> Any:
        """Return ``value``, or what is used in its place, under this name."""
        if isinstance(value, ModuleType) and value.__name__.partition(".")[0] == jax_privacy.__name__:
            return _LibraryView(value, self._observed)
        if name not in self._observed:
            return value

        def create(*args: Any, **options: Any) -> Any:
            function = value(*args, **options)
            return self._observed[name](function) or function

        return create
