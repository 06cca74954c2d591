"""The documentation as a site: `make docs` writes it to build/site. README.md is its front page, this folder has the others.

Sphinx reads Markdown by MyST, from the root of the repository, so that links work there and on the site.
"""

import re
import shutil
from pathlib import Path
from typing import Any

import gossamer

project, author, copyright = "Gossamer", "The Gossamer authors", "the Gossamer authors"
version = release = gossamer.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc"]
root_doc = "README"
include_patterns = ["*.md", "docs/**.md"]
html_theme = "pydata_sphinx_theme"
html_title = "Gossamer"
html_show_sourcelink = False
html_theme_options = {
    "header_links_before_dropdown": 3,
    "show_prev_next": False,
    "navigation_with_keys": True,
    "footer_end": [],
}
html_sidebars = {"**": []}
html_static_path = html_css_files = ["site.css"]

myst_heading_anchors = 3
default_role = "code"  # docstrings write names in single backticks
autodoc_typehints = "none"
autodoc_member_order = "bysource"
suppress_warnings = ["myst.header"]

NAVIGATION = {
    "Guide": [
        "docs/guide",
        "docs/api",
        "docs/report",
        "docs/training",
        "docs/low_rank",
        "docs/experts",
        "docs/embeddings",
        "docs/extending",
        "docs/troubleshooting",
    ],
    "Tutorials": [f"docs/tutorials/{name}" for name in ("prune_digits", "graph_network", "read_ir")],
    "How to": ["docs/hugging_face", "docs/ecosystem", "docs/deploy", "docs/scaling", "docs/gpu", "docs/arm64"],
    "From other libraries": [
        f"docs/migrate/{name}" for name in ("deepsparse", "torchao", "vllm", "dgl", "points", "torch_sparse")
    ],
    "Reference": ["docs/reference", "docs/architecture", "docs/benchmarks", "CHANGELOG", "CONTRIBUTING", "SECURITY"],
}
"""The pages in the order of the navigation. GitHub shows README.md as well, so the list is here."""

_listed = {page for pages in NAVIGATION.values() for page in pages}
_here = sorted(f"docs/{path.stem}" for path in Path(__file__).parent.glob("*.md"))
NAVIGATION["How to"] += [page for page in _here if page not in _listed]


def _with_navigation(app: Any, page: str, source: list[str]) -> None:
    """Adds the navigation to the front page."""
    if page == root_doc:
        for caption, pages in NAVIGATION.items():
            source[0] += f"\n\n```{{toctree}}\n:hidden:\n:caption: {caption}\n\n" + "\n".join(pages) + "\n```\n"


def _as_written(app: Any, what: str, name: str, of: Any, options: Any, lines: list[str]) -> None:
    """Shows a docstring as it is written: its first paragraph as text, and what follows in its columns."""
    first, _, rest = "\n".join(lines).strip().partition("\n\n")
    lines[:] = first.splitlines()
    if rest:
        lines += ["", ".. code-block:: text", "", *(f"    {line}" for line in rest.splitlines())]


def _known_languages(app: Any, page: str, source: list[str]) -> None:
    """Lets MyST read a fence whose language Pygments does not know."""
    source[0] = re.sub(r"^```mlir$", "```text", source[0], flags=re.MULTILINE)


def _as_index(app: Any, error: Exception | None) -> None:
    """Has the front page under the name that servers look for."""
    if error is None and app.builder.format == "html":
        shutil.copy(app.outdir / f"{root_doc}.html", app.outdir / "index.html")


def setup(app: Any) -> None:
    app.connect("source-read", _with_navigation)
    app.connect("source-read", _known_languages)
    app.connect("autodoc-process-docstring", _as_written)
    app.connect("build-finished", _as_index)
