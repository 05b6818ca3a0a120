"""Reports: runs as one self-contained page, as Markdown, or as JSON with a published schema."""

from dpaudit.report._report import SCHEMA_VERSION, Format, Report, read_own_run, read_run, schema
from dpaudit.report._run import Run, training_facts

__all__ = [
    "SCHEMA_VERSION",
    "Format",
    "Report",
    "Run",
    "read_own_run",
    "read_run",
    "schema",
    "training_facts",
]
