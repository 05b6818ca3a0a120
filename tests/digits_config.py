"""Configs of short audits on the embedded digits: one training run, or many models."""

_TEXT = """
output = "{output}"
seed = {seed}
{top}
[model]
name = "mlp"
hidden = [{hidden}]

[data]
name = "digits"
num_examples = {num_examples}

[training]
noise_multiplier = 1.0
sample_rate = 0.1
num_steps = {num_steps}

[audit]
{audit}
"""


def digits_config(
    output: object,
    *,
    seed: int = 3,
    top: str = "",
    hidden: int = 16,
    num_examples: int = 400,
    num_steps: int = 20,
    audit: str = "num_canaries = 32\nmethods = []",
) -> str:
    """Return it as TOML; ``top`` is a line before the tables, ``audit`` the table of this name."""
    return _TEXT.format(
        output=output,
        seed=seed,
        top=f"{top}\n" if top else "",
        hidden=hidden,
        num_examples=num_examples,
        num_steps=num_steps,
        audit=audit,
    )


_MANY = """
output = "{output}"
seed = 3
threat_model = "black-box"
pool = {pool}
[model]
name = "logistic-regression"
[data]
name = "digits"
num_examples = {num_examples}
[training]
noise_multiplier = 0
sample_rate = {sample_rate}
num_steps = {num_steps}
[audit]
num_models = {num_models}
{audit}
methods = []
"""


def models_config(
    output: object,
    *,
    pool: str = '"serial"',
    num_examples: int = 300,
    sample_rate: float = 1.0,
    num_steps: int = 2,
    num_models: int = 40,
    audit: str = "held_out = 64",
) -> str:
    """Return that of a black-box audit; without noise there is no curve of the accountant to wait for."""
    return _MANY.format(
        output=output,
        pool=pool,
        num_examples=num_examples,
        sample_rate=sample_rate,
        num_steps=num_steps,
        num_models=num_models,
        audit=audit,
    )
