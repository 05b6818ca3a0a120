"""The command line."""

from __future__ import annotations

import sys

from dpaudit.cli._environment import prepare

__all__ = ["main"]


def main() -> None:
    """The entry point of ``dpaudit``."""
    try:
        prepare(sys.argv[1:])
        from dpaudit.cli._app import app  # noqa: PLC0415  # so that an interrupt is quiet here as well

        app()
    except KeyboardInterrupt:
        sys.exit(130)
