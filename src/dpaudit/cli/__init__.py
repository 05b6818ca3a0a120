"""The command line."""

from __future__ import annotations

import sys

from dpaudit.cli._environment import prepare

__all__ = ["main"]


def main() -> None:
    """The entry point of ``dpaudit``."""
    try:
        prepare(sys.argv[1:])
        # here, so that an interrupt is quiet while they load as well
        from dpaudit.cli._app import app  # noqa: PLC0415
        from dpaudit.cli._completion import prepare_completion  # noqa: PLC0415

        prepare_completion()
        app()
    except KeyboardInterrupt:
        sys.exit(130)
