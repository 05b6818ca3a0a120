"""The numbers behind the pictures of a report."""

from dpaudit.report.figures._course import course_of
from dpaudit.report.figures._figures import Figures
from dpaudit.report.figures._histogram import Histogram

__all__ = ["Figures", "Histogram", "course_of"]
