"""Input canaries are made from held-out examples only, stay in the domain, and are what they say."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import dpaudit
from dpaudit._torch import HeldOutData
from dpaudit._torch._crafting import Crafting
from dpaudit.canaries import InputDomain
from dpaudit.training import cross_entropy, initialize
from dpaudit.training.data import Dataset, digits, hold_out, random_images
from dpaudit.training.models import conv_net, mlp, wide_resnet

KINDS = [
    dpaudit.Blank(),
    dpaudit.Mislabelled(),
    dpaudit.Adversarial(num_steps=4),
    dpaudit.Crafted(num_steps=4),
    dpaudit.Crafted(num_steps=4, long=True),
]


def binary(num_examples=200, num_features=40, num_classes=5, seed=0):
    rng = np.random.default_rng(seed)
    inputs = torch.from_numpy(rng.integers(0, 2, (num_examples, num_features))).float()
    return Dataset(inputs, torch.from_numpy(rng.integers(0, num_classes, num_examples)), num_classes)


def crafting(model, data, **more):
    return Crafting(model=model, loss=cross_entropy, data=data, max_grad_norm=1.0, **more)


def gradient(model, one, target):
    """The obvious way: one example, one backward pass."""
    loss = nn.functional.cross_entropy(model(one[None]), target[None])
    return torch.cat([part.reshape(-1) for part in torch.autograd.grad(loss, list(model.parameters()))])


def cosines(model, examples, held):
    reference = sum(gradient(model, x, y) for x, y in zip(held.inputs, held.targets, strict=True)) / len(held)
    found = [gradient(model, x, y) for x, y in zip(examples.inputs, examples.targets, strict=True)]
    return torch.stack([nn.functional.cosine_similarity(one, reference, dim=0).abs() for one in found])


def start(held, count, seed=0):
    """The held-out examples that canaries of this seed are made from."""
    return crafting(nn.Identity(), held)(dpaudit.Mislabelled(), count, np.random.default_rng(seed)).inputs


@pytest.fixture(params=["digits", "binary"])
def case(request):
    data, sizes = (digits(), (64, 32, 10)) if request.param == "digits" else (binary(), (40, 32, 5))
    return initialize(lambda: mlp(*sizes), 0), hold_out(data, 60)[1]


def test_crafting_brings_every_cosine_down_and_never_up(case):
    model, held = case
    canary = dpaudit.Crafted()
    made = crafting(model, held)(canary, 6, np.random.default_rng(0))
    before = type(made)(start(held, 6), made.targets)
    assert (cosines(model, made, held) <= cosines(model, before, held) + 1e-6).all()
    assert cosines(model, made, held).mean() < 0.5 * cosines(model, before, held).mean()


def test_a_long_canary_is_made_longer_than_a_crafted_one_that_is_too_short():
    held = hold_out(digits(), 100)[1]
    model = initialize(lambda: mlp(64, 32, 10), 0)
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    for _ in range(300):  # well trained: gradients are short
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(held.inputs), held.targets).backward()
        optimizer.step()

    def norms(canary):
        make = Crafting(model=model, loss=cross_entropy, data=held, max_grad_norm=10.0)
        made = make(canary, 6, np.random.default_rng(0))
        pairs = zip(made.inputs, made.targets, strict=True)
        return torch.stack([gradient(model, x, y).norm() for x, y in pairs])

    crafted, long = (norms(dpaudit.Crafted(long=long)) for long in (False, True))
    assert crafted.clamp(max=10.0).mean() < 8
    assert long.clamp(max=10.0).mean() > 9


def test_an_adversarial_example_raises_the_loss_and_stays_near_and_in_its_class(case):
    model, held = case
    made = crafting(model, held)(dpaudit.Adversarial(radius=0.05), 8, np.random.default_rng(1))
    near = start(held, 8, seed=1)
    losses = [cross_entropy(model(inputs), made.targets) for inputs in (near, made.inputs)]
    assert (losses[1] > losses[0]).all()
    moved = (made.inputs - near).flatten(1)
    if InputDomain.of(held.inputs).is_binary:
        assert (moved != 0).sum(dim=1).max() <= 0.05 * 40
    else:
        assert moved.abs().max() <= 0.05 * 2 + 1e-6


def test_a_mislabelled_example_is_a_held_out_one_with_another_class():
    held = hold_out(digits(), 50)[1]
    made = crafting(nn.Identity(), held)(dpaudit.Mislabelled(), 50, np.random.default_rng(0))
    known = {
        one.numpy().tobytes(): int(target) for one, target in zip(held.inputs, held.targets, strict=True)
    }
    own = [known[one.numpy().tobytes()] for one in made.inputs]
    assert len(known) == 50  # each is used once
    assert all(int(target) != was for target, was in zip(made.targets, own, strict=True))
    assert int(made.targets.min()) >= 0
    assert int(made.targets.max()) < 10


def test_a_blank_example_is_zero_or_what_is_nearest_to_it():
    for data, value in ((digits(), 0.0), (binary(), 0.0)):
        made = crafting(nn.Identity(), hold_out(data, 50)[1])(dpaudit.Blank(), 3, np.random.default_rng(0))
        assert (made.inputs == value).all()
    shifted = Dataset(digits().inputs + 5, digits().targets, 10)
    made = crafting(nn.Identity(), hold_out(shifted, 50)[1])(dpaudit.Blank(), 3, np.random.default_rng(0))
    assert (made.inputs == 4).all()


@given(canary=st.sampled_from(KINDS), seed=st.integers(0, 99), count=st.integers(1, 5))
def test_binary_features_stay_binary_and_pixels_stay_in_their_range(canary, seed, count):
    for data, sizes in ((binary(60), (40, 8, 5)), (digits(), (64, 8, 10))):
        held = hold_out(data, 40, seed=seed)[1]
        model = initialize(lambda sizes=sizes: mlp(*sizes), seed)
        inputs = crafting(model, held)(canary, count, np.random.default_rng(seed)).inputs
        assert inputs.shape == (count, *held.inputs.shape[1:])
        if InputDomain.of(held.inputs).is_binary:
            assert set(inputs.unique().tolist()) <= {0.0, 1.0}
        assert inputs.min() >= held.inputs.min()
        assert inputs.max() <= held.inputs.max()


def test_features_of_a_table_stay_in_their_own_ranges():
    rng = np.random.default_rng(0)
    inputs = torch.from_numpy(rng.random((100, 3)) * [1.0, 10.0, 0.1]).float()
    data = Dataset(inputs, torch.from_numpy(rng.integers(0, 2, 100)), 2)
    held = hold_out(data, 50)[1]
    made = crafting(initialize(lambda: mlp(3, 8, 2), 0), held)(dpaudit.Crafted(), 9, rng).inputs
    assert (made <= held.inputs.amax(dim=0)).all()
    assert (made >= held.inputs.amin(dim=0)).all()


@pytest.mark.parametrize("canary", KINDS, ids=lambda canary: type(canary).__name__)
def test_the_same_seed_makes_the_same_canaries_and_the_model_stays_as_it_was(canary):
    held = hold_out(digits(), 60)[1]
    model = initialize(lambda: nn.Sequential(mlp(64, 16, 10), nn.Dropout(0.2)), 0)
    kept, chance = [value.clone() for value in model.parameters()], torch.get_rng_state()
    made = [crafting(model, held)(canary, 4, np.random.default_rng(seed)) for seed in (0, 0, 1)]
    assert torch.equal(torch.get_rng_state(), chance)
    assert torch.equal(made[0].targets, made[1].targets)
    if "num_steps" not in canary.__dict__:  # dropout takes torch's own chance
        assert torch.equal(made[0].inputs, made[1].inputs)
    assert not torch.equal(made[0].targets, made[2].targets) or not torch.equal(
        made[0].inputs, made[2].inputs
    )
    for value, before in zip(model.parameters(), kept, strict=True):
        assert torch.equal(value, before)
        assert value.grad is None


@pytest.mark.parametrize("build", [conv_net, lambda: wide_resnet(10, 1)], ids=["conv-net", "wide-resnet"])
def test_canaries_for_convolutions_can_be_crafted(build):
    held = hold_out(random_images(40), 20)[1]
    model = initialize(build, 0)
    told = []
    make = crafting(model, held, on_step=lambda done, count: told.append((done, count)))
    made = make(dpaudit.Crafted(num_steps=2), 2, np.random.default_rng(0))
    assert told == [(1, 2), (2, 2)]
    before = type(made)(start(held, 2), made.targets)
    assert (cosines(model, made, held) <= cosines(model, before, held) + 1e-6).all()


def test_held_out_examples_are_apart_from_the_rest():
    rest, held = hold_out(digits(), 297)
    known = {one.numpy().tobytes() for one in rest.inputs}
    assert len(rest) == 1500
    assert not known & {one.numpy().tobytes() for one in held.inputs}


def test_duplicates_are_left_out_of_the_held_out_part():
    data = digits()
    doubled = Dataset(data.inputs.repeat(2, 1, 1, 1)[:2000], data.targets.repeat(2)[:2000], 10)
    rest, held = hold_out(doubled, 500)
    known = {one.numpy().tobytes() for one in rest.inputs}
    assert not known & {one.numpy().tobytes() for one in held.inputs}
    assert 300 < len(held) < 500
    test, held = hold_out(data, 1000, apart_from=data.split(900)[0])
    assert len(test) == 797
    assert len(held) < 600


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: HeldOutData(torch.zeros(3, 2), torch.zeros(3), 2), r"split off by hold_out\(data, ...\)"),
        (
            lambda: crafting(nn.Identity(), digits()),
            r"data must be split off by hold_out\(\), got a Dataset: canaries must not be",
        ),
        (lambda: hold_out(digits(), 1797), "num_held_out must be between 1 and 1796, got 1797"),
        (lambda: hold_out(digits(), 0), "num_held_out must be at least 1, got 0"),
        (
            lambda: hold_out(digits(), 9, apart_from=digits()),
            "held_out must not be used for training, but all of its 9 examples are",
        ),
        (
            lambda: crafting(nn.Identity(), hold_out(digits(), 9)[1])(
                dpaudit.Dirac(), 1, np.random.default_rng(0)
            ),
            r"an input canary such as Crafted\(\), got Dirac",
        ),
    ],
)
def test_what_is_not_held_out_is_refused(make, sentence):
    with pytest.raises(dpaudit.InputError, match=sentence):
        make()
