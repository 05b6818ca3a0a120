"""Experiment configs: TOML files that are fully validated before anything runs."""

from dpaudit.experiments.config._config import Config, load_config, parse_config

__all__ = ["Config", "load_config", "parse_config"]
