"""Lints of Opacus find each fault in the settings, and nothing in any kind of correct training."""

import copy
import json
from types import SimpleNamespace

import pytest
import torch
from opacus import PrivacyEngine
from opacus.optimizers import DPOptimizer
from opacus.schedulers import ExponentialGradClip, ExponentialNoise
from opacus.utils.adaptive_clipping import PrivacyEngineAdaptiveClipping
from opacus.utils.batch_memory_manager import BatchMemoryManager
from opacus.utils.uniform_sampler import UniformWithReplacementSampler
from opacus_runs import DELTA, OTHER_KINDS, run, small_data, small_model
from torch import nn
from torch.utils.data import ConcatDataset, DataLoader, IterableDataset, Subset

import dpaudit
from dpaudit.diagnostics import likely_causes
from dpaudit.observers.opacus import PreparedTraining, check, check_prepared, observe

pytestmark = [
    pytest.mark.filterwarnings("ignore:Optimal order is the largest alpha:UserWarning"),
    pytest.mark.filterwarnings("ignore:GDP accounting is experimental:UserWarning"),
]
NAMES = [
    "noise-multiplier",
    "clipping-norm",
    "loader-rate",
    "batch-sampler",
    "repeated-entries",
    "accountant-steps",
    "accountant-noise",
    "mixing-module",
    "public-parameters",
    "private-criterion",
    "loss-reduction",
    "noise-seed",
]


def checked(made, **options):
    """What check() finds in all that make_private made."""
    options = {"module": made.model, "loader": made.loader, "privacy_engine": made.engine, **options}
    return check(made.optimizer, **{"criterion": made.criterion, **options})


def names(report):
    return [finding.name for finding in report.findings]


def clean(report):
    return not report.findings and not report.not_covered


KINDS = {"flat": {}, "sum": {"loss_reduction": "sum"}, **OTHER_KINDS}


@pytest.mark.parametrize("kind", KINDS)
def test_correct_training_of_any_kind_has_no_finding_before_or_after_its_steps(private, kind):
    made = private(num_steps=10, noise_multiplier=0.8, num_examples=210, **KINDS[kind])
    assert clean(checked(made))
    with observe(made.optimizer, module=made.model, loader=made.loader, delta=DELTA) as recorder:
        run(made, 10)
    assert clean(checked(made))
    diagnosis = recorder.diagnose()
    assert not set(names(diagnosis)) & set(NAMES)
    assert not any("accountant" in one or "module=" in one for one in diagnosis.not_covered)


@pytest.mark.parametrize("accountant", ["rdp", "gdp", "prv"])
def test_every_accountant_is_found_and_agrees(private, accountant):
    made = private(noise_multiplier=0.8, engine=lambda **_: PrivacyEngine(accountant=accountant))
    assert clean(checked(made, noise_multiplier=0.8, sample_rate=0.05))
    with observe(made.optimizer, module=made.model, loader=made.loader, delta=DELTA) as recorder:
        run(made, 5)
    assert not set(names(recorder.diagnose())) & set(NAMES)


def test_correct_training_with_other_tools_has_no_finding(private):
    adaptive = private(
        noise_multiplier=0.8, batch_size=40, grad_sample_mode="ghost", engine=PrivacyEngineAdaptiveClipping
    )
    run(adaptive, 3)
    assert clean(checked(adaptive))
    hooks = private(noise_multiplier=0.8, wrap_model=False)
    assert clean(checked(hooks))
    made = private(noise_multiplier=0.8)
    with (
        BatchMemoryManager(
            data_loader=made.loader, max_physical_batch_size=4, optimizer=made.optimizer
        ) as split,
        observe(made.optimizer, module=made.model, loader=split, delta=DELTA) as recorder,
    ):
        run(made, 5, split)
    assert clean(checked(made, loader=split))
    assert not set(names(recorder.diagnose())) & set(NAMES)


@pytest.mark.parametrize("num_batches", [1, 2, 3, 20, 49, 98, 103, 107, 161, 187, 196, 197])
def test_no_number_of_batches_makes_a_finding(private, num_batches):
    """With 49 batches and others, Opacus draws 48, because 1 / (1 / 49) is less than 49."""
    for extra in (0, 1, 2):
        made = private(noise_multiplier=0.8, num_examples=2 * num_batches - extra % 2, batch_size=2)
        assert names(checked(made)) == []


def test_noise_for_a_target_epsilon_has_no_finding():
    model = small_model()
    made = PrivacyEngine().make_private_with_epsilon(
        module=model,
        optimizer=torch.optim.Adam(model.parameters()),
        data_loader=DataLoader(small_data(100), batch_size=10),
        target_epsilon=3.0,
        target_delta=DELTA,
        epochs=2,
        max_grad_norm=1.0,
    )
    assert names(check_prepared(PreparedTraining.of(made))) == []


def test_missing_or_less_noise_than_claimed_is_found(private):
    made = private(noise_multiplier=0.8)
    assert names(checked(made, noise_multiplier=1.0)) == ["noise-multiplier"]
    assert names(checked(made, noise_multiplier=0.805)) == []  # rounded
    made.optimizer.noise_multiplier = 0.0
    assert names(checked(made)) == ["noise-multiplier"]


@pytest.mark.parametrize("norm", [0.0, -1.0, float("inf"), float("nan")])
def test_a_clipping_norm_that_is_none_is_found(private, norm):
    made = private(noise_multiplier=0.8)
    made.optimizer.max_grad_norm = norm
    assert names(checked(made)) == ["clipping-norm"]


def test_a_clipping_scheduler_that_ghost_clipping_ignores_is_found(private):
    """The scheduler of Opacus sets the norm of the optimizer, but the model clips."""
    ghost = private(noise_multiplier=0.8, grad_sample_mode="ghost")
    scheduler = ExponentialGradClip(ghost.optimizer, gamma=0.5)
    with observe(ghost.optimizer, module=ghost.model, loader=ghost.loader, delta=DELTA) as recorder:
        run(ghost, 3)
        scheduler.step()
        run(ghost, 3)
    assert "clipping-norm" in names(recorder.diagnose())
    flat = private(noise_multiplier=0.8)
    ExponentialGradClip(flat.optimizer, gamma=0.5).step()
    assert names(checked(flat)) == []


def test_layers_that_are_clipped_to_more_than_the_noise_covers_are_found(private):
    made = private(noise_multiplier=0.8, **OTHER_KINDS["per-layer clipping"])
    made.optimizer.max_grad_norms = [1.0] * 4
    assert names(checked(made)) == ["clipping-norm"]


def test_a_loader_that_draws_more_often_than_the_accountant_assumes_is_found(private):
    made = private(noise_multiplier=0.8)
    made.loader.batch_sampler.sample_rate *= 2
    assert names(checked(made)) == ["loader-rate"]
    made.loader.batch_sampler.sample_rate /= 4
    report = checked(made)
    assert names(report) == []
    assert any("overestimated" in note for note in report.notes)


def test_a_loader_that_draws_more_often_than_claimed_is_found(private):
    made = private(noise_multiplier=0.8)  # at 0.05
    assert names(checked(made, sample_rate=0.04)) == ["loader-rate"]
    assert names(checked(made, sample_rate=0.0499)) == []


@pytest.mark.parametrize("loading", [{}, {"shuffle": True}, {"shuffle": True, "drop_last": True}])
def test_batches_of_one_size_are_found_unless_there_is_only_one(private, loading):
    made = private(noise_multiplier=0.8, poisson_sampling=False, loading=loading)
    assert names(checked(made)) == ["batch-sampler"]
    whole = private(noise_multiplier=0.8, poisson_sampling=False, loading=loading, batch_size=200)
    assert names(checked(whole)) == []
    other = private(
        noise_multiplier=0.8,
        poisson_sampling=False,
        loading=loading,
        engine=lambda **_: PrivacyEngine(accountant="gdp"),
    )
    assert names(checked(other)) == []
    assert any("poisson=False" in note for note in checked(other).notes)


def doubled(number):
    return ConcatDataset([data := small_data(number // 2), data])


def oversampled(number):
    return Subset(small_data(number), [*range(number - 3), 0, 1, 1])


def part(number):
    return Subset(ConcatDataset([small_data(number), small_data(number)]), range(1, number + 1))


@pytest.mark.parametrize(
    ("data", "found"),
    [(doubled, "100 of the 200"), (oversampled, "3 of the 200"), (part, None), (small_data, None)],
)
def test_examples_that_are_in_the_data_more_than_once_are_found(private, data, found):
    report = checked(private(noise_multiplier=0.8, data=data))
    assert names(report) == ([] if found is None else ["repeated-entries"])
    assert found is None or found in str(report)


def test_an_accountant_that_is_not_attached_is_found(private):
    made = private(noise_multiplier=0.8)
    made.optimizer.attach_step_hook(lambda _: None)
    assert names(checked(made)) == ["accountant-steps"]
    report = checked(made, privacy_engine=None)
    assert names(report) == []
    assert any("no accountant" in one for one in report.not_covered)


def test_an_accountant_inside_another_hook_is_found(private):
    made = private(noise_multiplier=0.8)
    own, seen = made.optimizer.step_hook, []

    def hook(optimizer):
        seen.append(optimizer)
        own(optimizer)

    made.optimizer.attach_step_hook(hook)
    assert clean(checked(made))


def observed(made, change=lambda: None, num_steps=6):
    """Observe some steps before and after a change."""
    with observe(made.optimizer, module=made.model, delta=DELTA, noise_multiplier=0.8) as recorder:
        run(made, num_steps)
        change()
        run(made, num_steps)
    return [name for name in names(recorder.diagnose()) if name in NAMES], recorder.diagnose()


def test_steps_that_the_accountant_does_not_know_are_found(private):
    made = private(noise_multiplier=0.8)
    own = made.optimizer.step_hook

    def forgetful(optimizer):
        if len(made.engine.accountant.history) == 0 or made.engine.accountant.history[-1][2] < 7:
            own(optimizer)

    made.optimizer.attach_step_hook(forgetful)
    found, diagnosis = observed(made)
    assert found == ["accountant-steps"]
    assert "7 of the 12 steps" in str(diagnosis)


def test_steps_before_the_observer_are_not_missing(private):
    made = private(noise_multiplier=0.8)
    run(made, 4)
    assert observed(made)[0] == []
    assert observed(made)[0] == []


def test_a_checkpoint_that_is_loaded_into_the_accountant_is_noted(private):
    made = private(noise_multiplier=0.8)
    run(made, 4)
    before = copy.deepcopy(made.engine.accountant.state_dict())
    found, diagnosis = observed(made, lambda: made.engine.accountant.load_state_dict(before))
    assert found == []
    assert any("history was replaced" in note for note in diagnosis.notes)


def test_a_scheduler_of_noise_is_a_note_unless_the_accountant_misses_it(private):
    made = private(noise_multiplier=0.8)
    found, diagnosis = observed(made, ExponentialNoise(made.optimizer, gamma=1.5).step)
    assert found == []
    assert any("between 0.8 and 1.2" in note for note in diagnosis.notes)

    made = private(noise_multiplier=1.2)
    step, rate = made.engine.accountant.step, 1 / len(made.loader)
    constant = made.engine.accountant.get_optimizer_hook_fn(rate)
    made.optimizer.attach_step_hook(constant)
    made.engine.accountant.step = lambda **known: step(**(known | {"noise_multiplier": 1.2}))
    found, diagnosis = observed(made, ExponentialNoise(made.optimizer, gamma=0.75).step)
    assert found == ["accountant-noise"]
    assert "6 steps had a noise multiplier of 0.9 or less" in str(diagnosis)


def test_schedulers_and_changed_noise_are_noted_before_the_first_step(private):
    made = private(noise_multiplier=0.8)
    parts = {"optimizer": made.optimizer, "module": made.model, "loader": made.loader}
    schedulers = {"noise": ExponentialNoise(made.optimizer, gamma=0.9), "rate": None}
    schedulers["norm"] = ExponentialGradClip(made.optimizer, gamma=0.9)
    for prepared in (parts | schedulers, [*parts.values(), *schedulers.values()]):
        report = check_prepared(PreparedTraining.of(prepared))
        assert names(report) == []
        assert any("ExponentialNoise changes the noise multiplier" in note for note in report.notes)
        assert any("ExponentialGradClip changes the clipping norm" in note for note in report.notes)
    assert not any("changes the" in note for note in check_prepared(PreparedTraining.of(parts)).notes)

    made.engine.accountant.step(noise_multiplier=0.8, sample_rate=0.1)
    assert not any("accountant has" in note for note in checked(made).notes)
    made.optimizer.noise_multiplier = 0.5
    assert any("is 0.5, but the accountant has steps with 0.8" in note for note in checked(made).notes)


def test_a_hook_whose_numbers_cannot_be_read_is_not_covered(private):
    made = private(noise_multiplier=0.8)
    accountant = made.engine.accountant
    made.optimizer.attach_step_hook(lambda _: accountant.step(noise_multiplier=2.0, sample_rate=0.1))
    assert any("the step hook is not that of Opacus" in text for text in checked(made).not_covered)


def with_norm(norm):
    return lambda: nn.Sequential(nn.Linear(8, 16), norm, nn.Linear(16, 2))


@pytest.mark.parametrize(
    ("norm", "word"),
    [
        (nn.BatchNorm1d(16, affine=False), "BatchNorm1d 1 normalizes"),
        (nn.BatchNorm1d(16).requires_grad_(False), "BatchNorm1d 1 normalizes"),
        (nn.BatchNorm1d(16, affine=False, track_running_stats=False).eval(), "BatchNorm1d 1 normalizes"),
        (nn.LayerNorm(16), None),
        (nn.GroupNorm(4, 16), None),
    ],
)
def test_modules_that_mix_examples_are_found_even_if_opacus_accepts_them(private, norm, word):
    made = private(noise_multiplier=0.8, build=with_norm(norm), num_examples=150)
    report = checked(made)
    assert names(report) == ([] if word is None else ["mixing-module"])
    assert word is None or word in str(report)


def test_without_the_model_an_audit_says_that_its_modules_are_not_checked(private):
    made = private(noise_multiplier=1.0, build=with_norm(nn.BatchNorm1d(16, affine=False)), num_examples=150)
    result = part_of_run(made, 4, module=None).audit()
    assert "mixing-module" not in names(result.diagnosis)
    assert any("not checked without module=" in text for text in result.not_covered)


def test_modules_that_mix_examples_are_found_if_only_the_last_layer_is_private(private):
    def build():
        model = with_norm(nn.BatchNorm1d(16, affine=False))()
        model[0].requires_grad_(False)
        return model

    made = private(noise_multiplier=1.0, build=build, num_examples=150)
    result = part_of_run(made, 4, module=made.model).audit()
    assert "mixing-module" in names(result.diagnosis)


def test_buffers_of_instance_norm_are_found(private):
    def images(number):
        inputs = torch.randn(number, 3, 4, 4)
        return torch.utils.data.TensorDataset(inputs, (inputs[:, 0, 0, 0] > 0).long())

    for tracks in (True, False):
        norm = nn.InstanceNorm2d(3, track_running_stats=tracks)
        made = private(
            noise_multiplier=0.8,
            build=lambda norm=norm: nn.Sequential(norm, nn.Flatten(), nn.Linear(48, 2)),
            data=images,
        )
        assert names(checked(made)) == ["mixing-module"] * tracks


def test_batch_norm_counts_in_the_mode_it_has_in_a_step(private):
    for mode in (True, False):
        norm = nn.BatchNorm1d(16, affine=False)
        made = private(noise_multiplier=0.8, build=with_norm(norm))
        norm.train(mode)
        found, _ = observed(made)
        norm.train(not mode)  # as after an evaluation
        assert found == ["mixing-module"] * mode


class TwoParts(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(8, 16), nn.Linear(16, 2)

    def forward(self, inputs):
        return self.head(torch.tanh(self.body(inputs)))


def two_parts(frozen):
    model = TwoParts()
    model.head.requires_grad_(not frozen)
    return model


def of_body(parameters):
    return torch.optim.SGD(parameters[:2], lr=0.1)


def test_parameters_of_another_optimizer_are_found(private):
    made = private(noise_multiplier=0.8, build=TwoParts, optimizer=of_body)
    other = torch.optim.SGD(made.model.head.parameters(), lr=0.1)
    report = checked(made, other_optimizers=[other])
    assert names(report) == ["public-parameters"]
    assert "Parameters head.weight, head.bias are updated by another optimizer, SGD" in str(report)
    unknown = checked(made)
    assert names(unknown) == []
    assert any("head.weight" in note for note in unknown.notes)
    private_too = DPOptimizer(other, noise_multiplier=0.8, max_grad_norm=1.0, expected_batch_size=10)
    assert not any("head" in text for text in (*checked(made, other_optimizers=[private_too]).notes, ""))


def test_frozen_parameters_and_the_wrapped_optimizer_are_no_finding(private):
    made = private(noise_multiplier=0.8, build=lambda: two_parts(frozen=True))
    report = checked(made, other_optimizers=[made.optimizer.original_optimizer])
    assert clean(report)
    assert not any("head" in note for note in report.notes)


def test_a_private_parameter_that_another_optimizer_updates_is_found(private):
    made = private(noise_multiplier=0.8)
    other = torch.optim.SGD(made.model.parameters(), lr=0.1)
    assert names(checked(made, other_optimizers=[other])) == ["public-parameters"]


def test_parameters_that_change_without_the_private_optimizer_are_to_check(private):
    made = private(noise_multiplier=0.8, build=TwoParts, optimizer=of_body)
    other = torch.optim.SGD(made.model.head.parameters(), lr=0.1)
    own = made.optimizer.zero_grad
    made.optimizer.zero_grad = lambda: (own(), made.model.zero_grad())
    assert observed(made)[1].to_check == ()
    _, diagnosis = observed(made, other.step)
    (fact,) = diagnosis.to_check
    assert fact.name == "outside-update"
    assert fact.sentence.startswith("Parameters head.weight, head.bias changed")


def test_a_loss_that_bypasses_ghost_clipping_is_found(private):
    made = private(noise_multiplier=0.8, grad_sample_mode="ghost")
    assert names(checked(made)) == []
    assert names(checked(made, criterion=nn.CrossEntropyLoss())) == ["private-criterion"]


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_loss_of_another_reduction_is_found(private, reduction):
    made = private(noise_multiplier=0.8, loss_reduction=reduction)
    for own in ("mean", "sum", "none"):
        found = names(checked(made, criterion=nn.CrossEntropyLoss(reduction=own)))
        assert found == ["loss-reduction"] * ({own, reduction} == {"mean", "sum"})


def test_class_weights_in_a_mean_are_found(private):
    made, weight = private(noise_multiplier=0.8), torch.tensor([1.0, 3.0])
    assert names(checked(made, criterion=nn.CrossEntropyLoss(weight=weight))) == ["loss-reduction"]
    assert names(checked(made, criterion=nn.CrossEntropyLoss(weight=torch.ones(2)))) == []
    assert names(checked(made, criterion=nn.BCEWithLogitsLoss(weight=weight))) == []
    summed = private(noise_multiplier=0.8, loss_reduction="sum")
    own = nn.CrossEntropyLoss(weight=weight, reduction="sum")
    assert names(checked(summed, criterion=own)) == []


def fresh():
    generator = torch.Generator()
    generator.seed()
    return generator


@pytest.mark.parametrize(
    ("generator", "before", "after"),
    [
        (torch.Generator(), True, True),
        (torch.Generator().manual_seed(42), True, False),
        (fresh(), False, False),
        (None, False, False),
    ],
)
def test_a_known_seed_of_the_noise_is_found_and_only_noted_in_an_audit(private, generator, before, after):
    made = private(noise_multiplier=0.8, noise_generator=generator)
    assert names(checked(made)) == ["noise-seed"] * before
    found, diagnosis = observed(made)
    assert found == ["noise-seed"] * after
    assert any("seed 42" in note for note in diagnosis.notes) == (before and not after)


def test_seeds_that_are_usual_in_experiments_are_noted(private):
    made = private(noise_multiplier=0.8, loading={"generator": torch.Generator().manual_seed(3)})
    report = checked(made)
    assert names(report) == []
    assert any("global generator, whose seed is 0" in note for note in report.notes)
    assert any("generator of the sampler has the seed 3" in note for note in report.notes)
    torch.seed()
    assert not any("global" in note for note in checked(made).notes)


@pytest.mark.parametrize(
    ("size", "batch_size", "words"),
    [
        (400, 20, ["with 400, Opacus draws at a rate of 1/20 and divides by 20", "399, it divides by 19"]),
        (400, 20, ["with 401 at batch size 20, it draws at 1/21 and divides by 19"]),
        (401, 20, ["with 400 at batch size 20, it draws at 1/20 and divides by 20"]),
        (407, 20, []),
    ],
)
def test_what_depends_on_the_number_of_examples_is_noted(private, size, batch_size, words):
    report = checked(private(noise_multiplier=0.8, num_examples=size, batch_size=batch_size))
    notes = [note for note in report.notes if "number of examples" in note]
    assert names(report) == []
    assert len(notes) == bool(words)
    assert all(word in notes[0] for word in words)


@pytest.mark.parametrize("size", [40, 41, 59, 60, 61])
def test_the_numbers_at_other_sizes_are_those_of_opacus(private, size):
    """The note states what make_private does with one example less or more."""

    def settings(number):
        made = private(noise_multiplier=0.8, num_examples=number, batch_size=20)
        return 1 / len(made.loader), made.optimizer.expected_batch_size

    notes = [note for note in checked(private(num_examples=size, batch_size=20)).notes if "number of" in note]
    differs = [other for other in (size - 1, size + 1) if settings(other) != settings(size)]
    assert bool(notes) == bool(differs)
    for other in differs:
        assert any(
            part.startswith(f" with {other}") and f"divides by {settings(other)[1]}" in part
            for part in notes[0].split(".")[0].split(";")
        )


class Accelerated(torch.optim.Optimizer):
    """Like the optimizer of Accelerate: one that holds another."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    def step(self):
        return self.optimizer.step()


class Lightning:
    """Like the optimizer of Lightning: a copy of attributes and classes that holds the original."""

    def __init__(self, optimizer):
        self.__dict__ = dict(vars(optimizer))
        self._optimizer = optimizer
        self.__class__ = type("LightningOptimizer", (Lightning, type(optimizer)), {})

    def step(self, closure=None):
        return self._optimizer.step(closure)


WRAPPERS = [
    Accelerated,
    Lightning,
    lambda one: Accelerated(Lightning(one)),
    lambda one: SimpleNamespace(base_optimizer=one, slow_weights=[]),
    lambda one: SimpleNamespace(optimizers=[one], model=None),
]


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_wrapped_optimizers_are_unwrapped(private, wrapper):
    made = private(noise_multiplier=0.8)
    outside = wrapper(made.optimizer)
    assert clean(check(outside, module=made.model, loader=made.loader))
    with observe(outside, module=made.model, delta=DELTA, seed=0) as recorder:
        run(SimpleNamespace(**{**vars(made), "optimizer": made.optimizer}), 3)
    assert recorder.num_done == 3


def test_wrapped_optimizers_that_are_not_private_are_named():
    other = torch.optim.SGD(small_model().parameters(), lr=0.1)
    with pytest.raises(dpaudit.InputError, match="Accelerated around SGD is not private"):
        check(Accelerated(other))
    with pytest.raises(dpaudit.InputError, match="SGD is not private"):
        check(other)


def test_a_wrapper_of_two_private_optimizers_is_ambiguous(private):
    both = SimpleNamespace(optimizers=[private().optimizer, private().optimizer])
    with pytest.raises(dpaudit.InputError, match="SimpleNamespace is not private"):
        check(both)


def test_what_a_function_returns_is_sorted_by_type_or_name(private):
    made = private(noise_multiplier=0.8)
    other = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    parts = made.model, made.optimizer, made.criterion, made.loader, made.engine, other
    for given in (parts, list(reversed(parts))):
        found = PreparedTraining.of(given)
        assert (found.module, found.optimizer, found.criterion, found.loader, found.privacy_engine) == parts[
            :5
        ]
        assert found.other_optimizers == (other,)
    by_name = {"optimizer": made.optimizer, "module": made.model, "epochs": 3}
    for given in (by_name, SimpleNamespace(**by_name), made.optimizer):
        assert PreparedTraining.of(given).optimizer is made.optimizer
    for wrong in ((made.model, made.loader), {"module": made.model}, None):
        with pytest.raises(dpaudit.InputError, match="A private optimizer is missing"):
            PreparedTraining.of(wrong)


def test_a_report_has_causes_and_plain_values(private):
    made = private(noise_multiplier=0.8)
    made.optimizer.noise_multiplier = 0.0
    report = checked(made, module=None)
    with pytest.raises(dpaudit.FindingError, match="noise-multiplier: The optimizer's noise multiplier is 0"):
        report.raise_for_findings()
    read = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert [one["name"] for one in read["findings"]] == ["noise-multiplier"]
    assert read["likely_causes"] == list(report.likely_causes()) != []
    assert "are not checked without module=" in str(report)
    assert str(report).startswith("1 finding in the settings.")
    checked(private(noise_multiplier=0.8)).raise_for_findings()


def test_every_lint_has_a_likely_cause():
    assert all(likely_causes(findings=[name]) for name in NAMES)


def test_samplers_that_are_not_known_are_no_finding(private):
    made = private(noise_multiplier=0.8)
    own = DataLoader(made.loader.dataset, batch_sampler=[[0, 1], [2]])
    assert names(checked(made, loader=own)) == []
    sampler = UniformWithReplacementSampler(num_samples=200, sample_rate=0.05, steps=7)
    assert names(checked(made, loader=DataLoader(made.loader.dataset, batch_sampler=sampler))) == []


def part_of_run(made, count, **options):
    """The recorder of a part of a training run."""
    known = {"module": made.model, "loader": made.loader, "num_canaries": 8, "seed": 0, "delta": DELTA}
    with observe(made.optimizer, **(known | options)) as recorder:
        run(made, count)
    return recorder


def test_more_accounted_steps_than_claimed_ones_are_found_when_the_audit_is_called(private):
    made = private(noise_multiplier=1.0)
    recorder = part_of_run(made, 6, num_steps=8)
    assert "accountant-steps" not in names(recorder.audit().diagnosis)
    run(made, 2)
    assert "accountant-steps" not in names(recorder.audit().diagnosis)
    run(made, 1)
    result = recorder.audit()
    [found] = [one for one in result.diagnosis.findings if one.name == "accountant-steps"]
    assert found.sentence == (
        "The accountant has 9 steps since the first observed one, but the claim is about 8 steps."
    )
    assert result.verdict is dpaudit.Verdict.VIOLATION
    assert result.likely_causes()[0].startswith("does training continue after the observed steps")
    assert "accountant-steps" not in names(recorder.audit(num_steps=9).diagnosis)


def test_steps_before_the_block_and_a_claim_of_the_observed_steps_are_no_finding(private):
    made = private(noise_multiplier=1.0)
    run(made, 5)
    recorder = part_of_run(made, 3)
    run(made, 5)
    assert "accountant-steps" not in names(recorder.audit().diagnosis)


def test_every_phase_of_a_run_may_have_its_own_claim(private):
    made = private(noise_multiplier=1.0)
    first, second = (part_of_run(made, count, num_steps=count) for count in (4, 6))
    for recorder in (first, second):
        assert "accountant-steps" not in names(recorder.audit().diagnosis)


def test_a_delta_of_at_least_one_over_the_number_of_examples_is_a_note(private):
    recorder = part_of_run(private(noise_multiplier=1.0), 4)

    def notes(delta):
        return [note for note in recorder.audit(delta=delta).diagnosis.notes if "claimed delta" in note]

    assert notes(0.02) == [
        "The claimed delta of 0.02 is not below 1/200, one over the number of examples: such a claim allows "
        "publishing an example."
    ]
    assert notes(0.004) == []


def test_coupled_examples_are_not_covered_with_or_without_a_module(private):
    for module in ({}, {"module": None}):
        result = part_of_run(private(noise_multiplier=1.0), 4, **module).audit()
        assert any("gradients that depend on other examples" in text for text in result.not_covered)


class Stream(IterableDataset):
    """Examples in an order of their own."""

    def __init__(self, num_examples):
        self._examples = small_data(num_examples)

    def __len__(self):
        return len(self._examples)

    def __iter__(self):
        return iter([self._examples[index] for index in range(len(self))])


def test_a_loader_of_an_iterable_data_set_is_checked_and_observed(private):
    made = private(noise_multiplier=0.8, data=Stream, poisson_sampling=False)
    sentence = (
        "The loader has batches of 10 from an IterableDataset, in its own order, but the sample rate 0.05 is "
        "accounted for as Poisson sampling."
    )
    assert sentence in [finding.sentence for finding in checked(made).findings]
    with observe(made.optimizer, loader=made.loader, sample_rate=0.05, delta=DELTA, seed=0) as recorder:
        run(made, 10)
    result = recorder.audit()
    assert sentence in [finding.sentence for finding in result.findings]
    assert any("an IterableDataset draws its examples itself" in gap for gap in result.not_covered)
