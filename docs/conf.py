"""How Sphinx builds the documentation; it must not know what the pages say."""

from horovod import __version__

project = "horovod"
author = "the horovod contributors"
version = release = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
html_theme = "furo"
html_title = "horovod"
exclude_patterns = ["_build"]

default_role = "code"  # docstrings put names of all kinds in single backquotes
myst_heading_anchors = 3
napoleon_google_docstring = True
napoleon_numpy_docstring = False
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # the docstrings say what signatures can't: shapes, units, ranks
autodoc_default_options = {"show-inheritance": False}
