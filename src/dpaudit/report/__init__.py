"""Reports: runs as one page that needs no network, as Markdown, or as JSON of a published schema."""

from dpaudit.report._read import read_run
from dpaudit.report._report import SCHEMA_VERSION, Format, Report, schema
from dpaudit.report._run import Run

__all__ = ["SCHEMA_VERSION", "Format", "Report", "Run", "read_run", "schema"]
