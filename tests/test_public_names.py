"""The public names: a change here is a change for users, and belongs into the changelog."""

import importlib
import inspect

import pytest

import dpaudit

NAMES = {
    "dpaudit": """
        Adversarial ApproximateDP BestOf Betting Blank Bound Claim ClopperPearson Constant Crafted Diagnosis
        Diagnostics Dirac DpauditError ErrorCounts Estimate Finding FindingError Fixed Gaussian Guesses
        HeldOut IncompleteError Inference InputError JointExact KatzLog Kind Laplace Leak LiveBound
        Mislabelled MissingExtraError Mixture Observations Optimal PiecewiseLinear Plan Posterior Power
        Predictable PureDP RandomDirection RandomizedResponse Recorder Result RocBand SameData Simultaneous
        SubsampledGaussian Tails ThreatModel ThresholdRule TradeOff Verdict ViolationError __version__ audit
        likely_causes lower_bound noise_for_epsilon one_run_bound one_run_fdp_bound plan_canaries
        plan_observations plan_steps smallest_leak training_epsilon
    """,
    "dpaudit.training": """
        DPSGD SGD Adam Augmentation Batch Diagnose EndToEnd FlipAndCrop GaussianSum Hook OneRun Optimizer
        PoissonSampling PrivateSum Sampler Seeds Step Training TwoBatches accuracy cross_entropy generator
        initialize
    """,
    "dpaudit.training.broken": """
        AveragedNoise ClippedAfterMean ConstantSeed FewSeeds NoNoiseWhenEmpty NoiseForTheMean NoiseTooSmall
        Noiseless RawMeanMixed SameSeedForLeaves ShuffledBatches Silent Unclipped UnnoisedCoordinates
    """,
    "dpaudit.experiments": """
        EXAMPLES Config Experiment Outcome Progress Running build example load_config parse_config rehearse
        run use_one_thread
    """,
    "dpaudit.experiments.trials": """
        Finished Group Neighbours Pool Processes Ray Recipe Scorer Serial Store Task Trial TrialPlan
        TrialProgress TrialsRun function_recipe log_odds open_store run_trials
    """,
    "dpaudit.zoo": """
        ENTRIES ENTRIES_FOUND_BY_TESTS ENTRIES_OF_PUBLIC_CODE Entry Evidence Judged Replay Scenario Scores
        chosen examine_entry faults judge run_zoo
    """,
}
DOCUMENTED = (
    *NAMES,
    "dpaudit.experiments.config",
    *(f"dpaudit.training.{name}" for name in ("data", "ensemble", "gradients", "models")),
)


# What the README, the other documents and code elsewhere rely on, with the names they call.
SURFACE = {
    "Claim": ["gaussian", "dpsgd", "approximate_dp", "accounted", "curve", "epsilon", "delta"],
    "Observations": ["from_presence"],
    "Result": ["raise_for_violation", "power", "estimate", "to_dict"],
    "Estimate": ["noise", "statement", "roc", "rates", "to_dict"],
    "Bound": ["statement", "to_dict"],
    "Diagnostics": ["observe_noise", "observe_batch", "observe_batch_size", "diagnose"],
    "Diagnosis": ["raise_for_findings", "likely_causes", "table", "to_dict"],
    "Verdict": ["VIOLATION", "NO_VIOLATION", "UNDERPOWERED"],
    "Kind": ["CONFIDENCE", "CREDIBLE", "HEURISTIC"],
}


# what authors of trade-offs, inferences, threshold rules and observers import besides
EXTENSIONS = {
    "dpaudit.stats": """
        BoundQuery CountInference ExactInference FloatArray IntArray Region ThresholdResult plausible_counts
    """,
    "dpaudit.canaries": "Directions CanaryPlan GradientCanary",
    "dpaudit.recording": "PerStep Recorder CanaryScorer WholeRun",
    "dpaudit.observers.opacus": "LintReport PreparedTraining check check_prepared hold_out observe",
}


def test_what_extensions_need_is_public() -> None:
    for home, names in EXTENSIONS.items():
        module = importlib.import_module(home)
        assert {*names.split()} <= {*module.__all__}, home


@pytest.mark.parametrize("home", NAMES)
def test_the_public_names_are_these(home: str) -> None:
    assert importlib.import_module(home).__all__ == NAMES[home].split()


@pytest.mark.parametrize("home", DOCUMENTED)
def test_every_public_name_exists_and_is_documented(home: str) -> None:
    module = importlib.import_module(home)
    values = {name: getattr(module, name) for name in module.__all__}
    named = {
        name: value for name, value in values.items() if inspect.isclass(value) or inspect.isroutine(value)
    }
    assert [name for name, value in named.items() if not inspect.getdoc(value)] == []


def test_the_public_classes_have_the_names_that_users_call() -> None:
    for name, members in SURFACE.items():
        for member in members:
            assert hasattr(getattr(dpaudit, name), member), f"{name}.{member}"


def test_no_verdict_says_that_a_training_is_private() -> None:
    for verdict in dpaudit.Verdict:
        words = verdict.value.lower().split()
        assert not {"private", "pass", "passed", "safe"} & {word.strip(".,:") for word in words}


@pytest.mark.slow  # imports torch and JAX
@pytest.mark.parametrize(
    ("home", "name"),
    [
        ("dpaudit.observers", "observe_library"),
        ("dpaudit.observers.step", "observe_step"),
        ("dpaudit.opacus", "observe"),
        ("dpaudit.jax_privacy", "observe"),
        ("dpaudit.jax_privacy", "observe_model"),
    ],
)
def test_every_observer_lists_its_arguments_and_the_claim_first(home: str, name: str) -> None:
    parameters = inspect.signature(getattr(importlib.import_module(home), name)).parameters.values()
    keywords = {entry.name: entry.default for entry in parameters if entry.kind is entry.KEYWORD_ONLY}
    assert next(iter(keywords)) == "claim"
    assert {"canary", "confidence", "tests", "seed", "callbacks"} <= keywords.keys()
    assert (keywords["confidence"], keywords["tests"], keywords["callbacks"]) == (0.95, True, ())
    assert not any(entry.kind is entry.VAR_KEYWORD for entry in parameters)
