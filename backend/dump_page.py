"""Writes the page of a dump: adds the decisions about a graph to the data in the folder, and writes index.html again."""

import warnings
from pathlib import Path

from gossamer.backend.graph.inputs import Inputs
from gossamer.backend.page import saved
from gossamer.backend.page.render import write_index
from gossamer.backend.pictures import patterns_of
from gossamer.backend.regions.details import answered
from gossamer.backend.report.options import Options
from gossamer.backend.report.report import Collector
from gossamer.backend.report.table import Report
from gossamer.runtime.torch_internals import known_off


def write_page(found: Collector, inputs: Inputs, options: Options) -> None:
    """Adds the decisions about the graph of these inputs to the page of the dump."""
    report = Report(
        answered(found.decisions), [], len(found.kernels), found.seconds, known_off(), found.training, min_gain=options.min_gain
    )
    report.patterns, report.flows = patterns_of(inputs, found.decisions, {}), found.flows
    add_to_page(report, options)


def add_to_page(report: Report, options: Options) -> None:
    """Adds a report to the page of the dump. If that fails, warns, because the model can run without a page."""
    if options.dump_ir is None:
        return
    try:
        saved.add(Path(options.dump_ir), report.data())
        write_index(Path(options.dump_ir))
    except Exception as problem:  # errors of the disk, or of data that no page has shown before
        if options.strict:
            raise
        warnings.warn(f"gossamer: the page of the dump in {options.dump_ir} could not be written: {problem}", stacklevel=2)
