"""A reproduced figure as files: data, pictures, and a page that sets it beside the paper."""

from dpaudit._plotting import require_plotting
from dpaudit.report.reproduction._write import write_reproduced

__all__ = ["require_plotting", "write_reproduced"]
