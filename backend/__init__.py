"""The torch.compile backend. It turns parts of Dynamo's graph into sparse regions, and reports its decisions."""

from gossamer.backend.entry import sparse
from gossamer.backend.report.options import Options
from gossamer.backend.report.report import Decision
from gossamer.backend.report.table import Report

__all__ = ["Decision", "Options", "Report", "sparse"]
