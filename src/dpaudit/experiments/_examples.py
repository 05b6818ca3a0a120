"""Configs to start from."""

from __future__ import annotations

from importlib import resources

from dpaudit.errors import InputError

__all__ = ["EXAMPLES", "example"]

EXAMPLES = ("digits", "paper-cifar10", "end-to-end", "purchase", "input")


def example(name: str) -> str:
    """The text of a commented config."""
    if name not in EXAMPLES:
        raise InputError(f"Expected an example of {', '.join(EXAMPLES)}, got {name!r}.")
    return (resources.files("dpaudit.experiments") / "examples" / f"{name}.toml").read_text(encoding="utf-8")
