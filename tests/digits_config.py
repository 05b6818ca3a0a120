"""The config of a short one-run audit on the embedded digits."""

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
