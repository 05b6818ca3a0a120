"""Training loops that Accelerate prepares, before or after Opacus."""

import pytest
import torch
from accelerate import Accelerator
from opacus import PrivacyEngine
from opacus_runs import DELTA, small_data, small_model
from torch import nn
from torch.utils.data import DataLoader

import dpaudit
from dpaudit.observers.opacus import observe


@pytest.mark.parametrize("is_first", [True, False], ids=["before make_private", "after make_private"])
def test_accelerate_may_prepare_the_parts_before_or_after_make_private(is_first):
    torch.manual_seed(0)
    model, accelerator = small_model(), Accelerator(cpu=True)
    parts = model, torch.optim.SGD(model.parameters(), lr=0.5), DataLoader(small_data(200), batch_size=10)
    if is_first:
        parts = accelerator.prepare(*parts)
    names = dict(zip(("module", "optimizer", "data_loader"), parts, strict=True))
    parts = PrivacyEngine(accountant="rdp").make_private(**names, noise_multiplier=1.0, max_grad_norm=1.0)
    if not is_first:
        parts = accelerator.prepare(*parts)
    module, optimizer, loader = parts
    with observe(optimizer, loader=loader, delta=DELTA, seed=0) as recorder:
        for _ in range(2):
            for inputs, targets in loader:
                optimizer.zero_grad()
                accelerator.backward(nn.functional.cross_entropy(module(inputs), targets))
                optimizer.step()
    result = recorder.audit()
    assert recorder.num_done == 2 * len(loader)
    assert result.verdict is not dpaudit.Verdict.VIOLATION
    assert {"participation-counts", "batch-sizes"} <= {check.name for check in result.diagnosis.checks}
