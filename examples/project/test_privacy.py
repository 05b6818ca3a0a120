"""The privacy test of the project: it fails if the training code leaks more than the model card says."""

import pytest
import torch
from training import private_parts, train

import dpaudit
from dpaudit.opacus import observe

# The numbers of the model card, not of the training code: a wrong number there would be wrong here too.
CLAIM = dpaudit.Claim.dpsgd(noise_multiplier=0.9, sample_rate=0.05, num_steps=300, delta=1e-5)


@pytest.mark.filterwarnings("ignore:Secure RNG turned off", "ignore:Full backward hook")
def test_training_is_as_private_as_the_model_card_says(dp_audit):
    torch.manual_seed(dp_audit.seed)
    model, optimizer, loader = private_parts()
    with observe(optimizer, claim=CLAIM, loader=loader, module=model, seed=dp_audit.seed) as recorder:
        train(model, optimizer, loader, num_epochs=5)  # 100 steps are enough
    dp_audit(recorder)
