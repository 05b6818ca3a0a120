"""A report as one HTML page that needs nothing else."""

from dpaudit.report.page._page import page

__all__ = ["page"]
