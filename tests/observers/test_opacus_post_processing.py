"""Code between noise and update that sees only the release changes neither findings nor the update."""

import types

import numpy as np
import pytest
import torch
from opacus.optimizers import DPOptimizer
from opacus_runs import DELTA, OTHER_KINDS, run, weights

from dpaudit.observers.opacus import observe
from dpaudit.observers.opacus._clipping import CoordinateIndex, flat

STEPS = 60
OF_NOISE = {
    "noise-variance",
    "noise-by-sum",
    "noise-by-batch",
    "noise-by-canaries",
    "noise-tails",
    "step-noise",
}


def other_divisor(optimizer):
    def scale_grad(self):
        for value in self.params:
            value.grad /= 50.0

    optimizer.scale_grad = types.MethodType(scale_grad, optimizer)


def after_step_hook(change):
    def install(optimizer):
        own = optimizer.step_hook

        def hook(this):
            own(this)
            change(this.params)

        optimizer.attach_step_hook(hook)

    return install


CHANGES = {
    "other divisor": other_divisor,
    "norm": after_step_hook(lambda params: torch.nn.utils.clip_grad_norm_(params, 0.3)),
    "value": after_step_hook(lambda params: torch.nn.utils.clip_grad_value_(params, 0.02)),
}


def found(made, **options):
    with observe(made.optimizer, module=made.model, loader=made.loader, seed=0, **options) as recorder:
        run(made, STEPS)
    return recorder.diagnose()


@pytest.mark.few(4)
@pytest.mark.parametrize("mode", ["hooks", "ghost"])
@pytest.mark.parametrize("change", CHANGES)
def test_post_processing_of_a_release_is_no_finding(private, change, mode):
    made = private(noise_multiplier=1.0, num_steps=STEPS, grad_sample_mode=mode)
    CHANGES[change](made.optimizer)
    assert not {finding.name for finding in found(made).findings}


# in the first step with a smaller norm, a limit of the norm cannot be told from a factor
@pytest.mark.parametrize("change", ["other divisor", "value"])
def test_the_update_is_what_post_processing_makes_of_the_release_without_canaries(private, change):
    final = []
    for observed in (False, True):
        torch.manual_seed(3)
        made = private(noise_multiplier=1.0, num_steps=STEPS)
        CHANGES[change](made.optimizer)
        if observed:
            with observe(made.optimizer, loader=made.loader, delta=DELTA, seed=0):
                run(made, 20)
        else:
            run(made, 20)
        final.append(weights(made.model))
    torch.testing.assert_close(*final, rtol=1e-3, atol=1e-5)


def by_batch(optimizer):
    def scale_grad(self):
        for value in self.params:
            value.grad /= max(len(value.grad_sample), 1)

    optimizer.scale_grad = types.MethodType(scale_grad, optimizer)


def by_sum(optimizer):
    own = optimizer.scale_grad

    def scale_grad(self):
        own()
        norm = float(torch.stack([value.summed_grad.norm() for value in self.params]).norm())
        for value in self.params:
            value.grad *= 5 / (1 + norm)

    optimizer.scale_grad = types.MethodType(scale_grad, optimizer)


def for_large_batches(optimizer):
    own = optimizer.scale_grad

    def scale_grad(self):
        own()
        for value in self.params:
            value.grad *= 0.5 if len(value.grad_sample) > self.expected_batch_size else 1.0

    optimizer.scale_grad = types.MethodType(scale_grad, optimizer)


@pytest.mark.parametrize("change", [by_batch, by_sum, for_large_batches])
def test_a_factor_that_depends_on_the_batch_is_still_found(private, change):
    made = private(noise_multiplier=1.0, num_steps=STEPS)
    change(made.optimizer)
    assert {finding.name for finding in found(made).findings} & OF_NOISE


def decayed(value):
    return 0.2 * value.detach()


def unclipped(value):
    return 0.2 * value.grad_sample.sum(dim=0) / 16


@pytest.mark.parametrize("part", [decayed, unclipped])
@pytest.mark.parametrize("mode", ["flat", "per-layer clipping"])
def test_weight_decay_after_the_noise_is_no_finding_but_a_gradient_is(private, part, mode):
    def add(params):
        for value in params:
            value.grad += part(value)

    made = private(noise_multiplier=1.0, num_steps=200, **OTHER_KINDS.get(mode, {}))
    after_step_hook(add)(made.optimizer)
    with observe(made.optimizer, loader=made.loader, seed=0) as recorder:
        run(made, 200)
    diagnosis = recorder.diagnose()
    is_decay = any("multiple of the weights" in note for note in diagnosis.notes)
    names = {finding.name for finding in diagnosis.findings}
    assert (names, is_decay) == ((set(), True) if part is decayed else ({"noise-by-sum"}, False))


def test_coordinates_are_those_of_the_concatenated_parameters():
    parameters = [torch.randn(shape) for shape in ((3, 4), (2,), (5, 2), (1,))]
    chosen = np.array([0, 7, 11, 12, 14, 23, 24])  # at both ends of parameters
    index, expected = CoordinateIndex(chosen, parameters), flat(parameters)
    assert torch.equal(index.read(parameters), expected[chosen])
    index.write(parameters, torch.arange(7.0))
    expected[chosen] = torch.arange(7.0)
    assert torch.equal(CoordinateIndex.complete(parameters).read(parameters), expected)


class Compressed(DPOptimizer):
    """Sends the largest quarter of the noisy numbers; or of those that are large before the noise."""

    by_sum = False

    def step(self, closure=None):
        if not self.pre_step():
            return None
        for value in self.params:
            guide = value.summed_grad if self.by_sum else value.grad
            smallest = guide.abs().flatten().topk(max(1, guide.numel() // 4)).values[-1]
            value.grad = value.grad * (guide.abs() >= smallest)
        return self.original_optimizer.step(closure)


@pytest.mark.parametrize("by_sum", [False, True])
def test_compression_is_no_finding_unless_it_sees_the_sum_before_the_noise(private, by_sum):
    made = private(noise_multiplier=1.0, num_steps=STEPS)
    made.optimizer.__class__ = Compressed
    made.optimizer.by_sum = by_sum
    names = {finding.name for finding in found(made).findings}
    assert bool(names) is by_sum
    assert ("update-by-sum" in names) is by_sum


def test_the_update_is_the_compressed_release_without_canaries(private):
    made = private(noise_multiplier=1.0, num_steps=STEPS)
    made.optimizer.__class__ = Compressed
    with observe(made.optimizer, loader=made.loader, delta=DELTA, seed=0) as recorder:
        run(made, 20)
        sizes = [(value.grad != 0).float().mean().item() for value in made.optimizer.params]
    assert max(sizes) < 0.51  # of the smallest parameter, one of two
    assert recorder.audit().verdict.name != "VIOLATION"
