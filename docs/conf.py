"""The documentation as a site: `make docs` writes it to build/site. README.md is its front page, this folder has the others.

Sphinx reads Markdown by MyST, from the root of the repository, so that links work there and on the site.
"""

import re
import shutil
import sys
from pathlib import Path
from typing import Any

import gossamer

sys.path.insert(0, str(Path(__file__).parent))
from docstrings import as_rst  # type: ignore[import-not-found]

project, author, copyright = "Gossamer", "The Gossamer authors", "the Gossamer authors"
version = release = gossamer.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc"]
root_doc = "README"
include_patterns = ["*.md", "docs/**.md"]
html_theme = "pydata_sphinx_theme"
html_title = "Gossamer"
html_show_sourcelink = False
html_theme_options = {
    "navbar_center": ["navigation.html"],
    "show_prev_next": False,
    "navigation_with_keys": True,
    "footer_end": [],
}
html_context = {"default_mode": "auto"}  # light or dark, as the browser asks
html_sidebars = {"**": []}
html_static_path = ["site.css", "site.js"]
html_css_files, html_js_files = ["site.css"], ["site.js"]
templates_path = ["templates"]
highlight_language = "text"  # commands and output have no colours

myst_heading_anchors = 3
smartquotes = False  # quotes in docstrings are code
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
        "docs/structured_matrices",
        "docs/experts",
        "docs/embeddings",
        "docs/caches",
        "docs/extending",
        "docs/troubleshooting",
    ],
    "Tutorials": [
        f"docs/tutorials/{name}"
        for name in (
            "prune_digits",
            "train_sparse",
            "graph_network",
            "window_attention",
            "points",
            "read_ir",
            "own_schedule",
        )
    ],
    "How to": ["docs/hugging_face", "docs/ecosystem", "docs/deploy", "docs/scaling", "docs/gpu", "docs/arm64"],
    "From other libraries": [
        f"docs/migrate/{name}" for name in ("deepsparse", "torchao", "vllm", "dgl", "points", "torch_sparse")
    ],
    "Reference": [
        "docs/reference",
        "docs/architecture",
        "docs/gpu_kernels",
        "docs/benchmarks",
        "CHANGELOG",
        "CONTRIBUTING",
        "SECURITY",
    ],
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


def _for_templates(app: Any, page: str, template: str, context: dict[str, Any], doctree: Any) -> None:
    """Gives the menus of the header the title of each page, and a link to it from this page."""
    titles = app.env.titles
    context["menus"] = {
        caption: [(titles[name].astext(), context["pathto"](name), name == page) for name in pages]
        for caption, pages in NAVIGATION.items()
    }


def _as_rst(app: Any, what: str, name: str, of: Any, options: Any, lines: list[str]) -> None:
    lines[:] = as_rst("\n".join(lines))


def _short_defaults(app: Any, what: str, name: str, of: Any, options: Any, signature: str | None, returns: Any) -> Any:
    """Shortens defaults that nobody would type. Properties have no signature."""
    return signature and (re.sub(r"<factory>|<object object[^>]*>|Format\.parse\('[^']*'\)", "…", signature), returns)


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
    app.connect("html-page-context", _for_templates)
    app.connect("autodoc-process-docstring", _as_rst)
    app.connect("autodoc-process-signature", _short_defaults)
    app.connect("build-finished", _as_index)
