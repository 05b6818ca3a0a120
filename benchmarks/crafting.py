"""Measure how long crafting a canary takes on one core, and how small its cosine becomes.

    python benchmarks/crafting.py [--wide]

The images are random and have the size of CIFAR-10; the time does not depend on their content. A canary for
the ConvNet must take less than 10 seconds. ``--wide`` adds WRN-16-4, which takes about a minute.
"""

from __future__ import annotations

import sys
import time

import numpy as np
import torch

import dpaudit
from dpaudit._torch._crafting import Crafting, cosine_objective, mean_gradient
from dpaudit.training import cross_entropy, initialize
from dpaudit.training.data import hold_out, random_images
from dpaudit.training.models import conv_net, purchase_mlp, wide_resnet

_HELD_OUT = 128


def _measure(name, build, shape, canary):
    data = random_images(2 * _HELD_OUT, shape=shape, num_classes=100 if len(shape) == 1 else 10)
    held, model = hold_out(data, _HELD_OUT)[1], initialize(build, 0)
    make = Crafting(model=model, loss=cross_entropy, data=held, max_grad_norm=1.0)
    started = time.perf_counter()
    made = make(canary, 1, np.random.default_rng(0))
    seconds = time.perf_counter() - started
    reference = mean_gradient(model, cross_entropy, held)
    cosine = cosine_objective(model, cross_entropy, reference, dpaudit.Crafted(), 1.0)
    value = float(cosine(made.inputs, made.targets)[0])
    print(f"{name:12} {type(canary).__name__:12} {seconds:7.2f} s   |cos| {value:.4f}", flush=True)
    return seconds


def main() -> None:
    torch.set_num_threads(1)
    image = (3, 32, 32)
    _measure("mlp", purchase_mlp, (600,), dpaudit.Crafted())
    _measure("conv-net", conv_net, image, dpaudit.Adversarial())
    seconds = _measure("conv-net", conv_net, image, dpaudit.Crafted())
    if "--wide" in sys.argv:
        _measure("wrn-16-4", wide_resnet, image, dpaudit.Crafted())
    if seconds >= 10:
        raise SystemExit(f"Expected a canary for the ConvNet in less than 10 s, but it took {seconds:.1f} s.")


if __name__ == "__main__":
    main()
