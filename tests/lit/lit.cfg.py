"""Tests of the compiler passes on MLIR text: `lit tests/lit`, from any folder.

The tools are those of the Python that runs lit; where they are not installed as scripts, they run as modules.
"""

import os
import sys
import sysconfig
from pathlib import Path

import lit.formats

config.name = "gossamer"  # noqa: F821  (lit defines `config`)
config.test_format = lit.formats.ShTest()  # noqa: F821
config.suffixes = {".mlir"}  # noqa: F821
config.test_source_root = str(Path(__file__).parent)  # noqa: F821

scripts = Path(sysconfig.get_path("scripts"))
config.environment["PATH"] = os.pathsep.join([str(scripts), os.environ.get("PATH", "")])  # noqa: F821
if "PYTHONPATH" in os.environ:
    config.environment["PYTHONPATH"] = os.environ["PYTHONPATH"]  # noqa: F821
for tool, module in [("gossamer-opt", "gossamer.passes.opt"), ("filecheck", "filecheck")]:
    if not (scripts / tool).exists():
        command = f"'{sys.executable}' -P -m {module}"
        config.substitutions.append((rf"(?<![\w/.-]){tool}(?![\w/.-])", command))  # noqa: F821
