"""Sphinx: pages in Markdown, maths and arguments from the docstrings. `make docs` builds them."""

import sys
from pathlib import Path

import fusedstep

sys.path.insert(0, str(Path(__file__).parent / "_ext"))
import pictures

project = "fusedstep"
author = "the fusedstep authors"
project_copyright = author
version = release = fusedstep.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "mathml",
    "columns",
    "facts",
    "public",
    "inline",
    "sources",
]
exclude_patterns = ["_build"]
# links to a heading of a page
myst_heading_anchors = 3
myst_enable_extensions = ["dollarmath"]
html_math_renderer = "mathml"

html_theme = "furo"
html_title = "fusedstep"
pygments_style = "friendly"
pygments_dark_style = "github-dark"
html_favicon = "_static/icon.svg"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sourcelink = False
# the API page lists all names
html_use_index = html_domain_indices = False
html_copy_source = False
html_theme_options = {
    "navigation_with_keys": True,
    "light_css_variables": pictures.variables(0),
    "dark_css_variables": pictures.variables(1),
}
# what a prompt says is not copied, nor what a program answered
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

# single backticks in docstrings: a link where we have a page for it, code otherwise
default_role = "py:obj"
autodoc_typehints = "none"
autodoc_preserve_defaults = True
autosummary_generate = False
python_maximum_signature_line_length = 80
# several arguments may share a line
napoleon_use_param = False
