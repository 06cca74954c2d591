"""From Dynamo's graph to sparse regions: the torch.compile backend and what it reports."""

from gossamer.backend.entry import sparse
from gossamer.backend.report.options import Options
from gossamer.backend.report.report import Decision
from gossamer.backend.report.table import Report

__all__ = ["Decision", "Options", "Report", "sparse"]
