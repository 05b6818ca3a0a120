"""Makes the docstrings readable for mkdocs: examples become code blocks, Sphinx roles become code."""

from __future__ import annotations

import re
from typing import Any

import griffe

_EXAMPLE = re.compile(r"^>>> .*(?:\n(?!\n).*)*", re.MULTILINE)
_ROLE = re.compile(r":(?:class|func|meth):(`[^`]+`)")


class Docstrings(griffe.Extension):
    """Rewrites every docstring before it is rendered."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Rewrite the docstring of one module, class, function or attribute."""
        del kwargs
        if obj.docstring:
            text = _EXAMPLE.sub(lambda match: f"```pycon\n{match[0]}\n```", obj.docstring.value)
            obj.docstring.value = _ROLE.sub(r"\1", text)
