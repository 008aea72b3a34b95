"""Sphinx settings: MyST pages, numpy-style docstrings, the furo theme. Reads the version from the package."""

from pygments.lexers.special import TextLexer
from sphinx.application import Sphinx

from devipc import __version__

project = "devipc"
author = "the devipc maintainers"
project_copyright = "2026, the devipc maintainers"
version = release = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"devipc {__version__}"

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

napoleon_google_docstring = False
napoleon_use_rtype = False
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_class_signature = "separated"


def setup(app: Sphinx) -> None:
    # State diagrams are drawn where Markdown is shown as it is; here they are text.
    app.add_lexer("mermaid", TextLexer)
