"""python -m gossamer.view DIR | report.html: opens the page of a dump or of a saved report in a browser.

    python -m gossamer.view ir                    writes ir/index.html from the files of options={"dump_ir": "ir"}
    python -m gossamer.view report.html           opens a file of Report.save
    python -m gossamer.view ir --no-browser       only prints the path

Exit status: 0, or 2 if there is nothing to show.
"""

import argparse
import sys
import webbrowser
from collections.abc import Sequence
from pathlib import Path

from gossamer.backend.page.render import write_index
from gossamer.dialects.command_line import ends_with_its_reader


@ends_with_its_reader
def main(argv: Sequence[str] | None = None) -> int:
    """Runs the tool and returns the exit status. `argv` defaults to the command line."""
    parser = argparse.ArgumentParser("python -m gossamer.view", description="Open the page of a dump or of a saved report.")
    parser.add_argument("path", type=Path, metavar="DIR|FILE", help="the folder of dump_ir, or a file of Report.save")
    parser.add_argument("--no-browser", action="store_true", help="print the path of the page, and open no browser")
    options = parser.parse_args(argv)
    page = write_index(options.path) if options.path.is_dir() else options.path
    if page is None or not page.is_file():
        problem = f"{options.path} has no report: give a folder that dump_ir has written to" if page is None else "no such file"
        print(f"gossamer.view: {options.path}: {problem}" if page else f"gossamer.view: {problem}", file=sys.stderr)
        return 2
    print(page)
    if not options.no_browser:
        webbrowser.open(page.resolve().as_uri())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
