"""Entry point for ``python -m dpaudit``."""

from __future__ import annotations

from dpaudit.cli import main

if __name__ == "__main__":
    main()
