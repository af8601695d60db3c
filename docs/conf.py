"""Sphinx: pages in Markdown, maths and arguments from the docstrings. `make docs` builds them."""

import fusedstep

project = "fusedstep"
author = "the fusedstep authors"
project_copyright = author
version = release = fusedstep.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.mathjax", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
# links to a heading of a page
myst_heading_anchors = 3
myst_enable_extensions = ["dollarmath"]

html_theme = "alabaster"
html_theme_options = {
    "description": "Fused optimizers for PyTorch",
    "page_width": "1080px",
    "fixed_sidebar": True,
}
html_sidebars = {"**": ["about.html", "searchfield.html", "navigation.html"]}
html_show_sourcelink = False
html_copy_source = False
# 4 knows \_ inside \text; older versions of Sphinx load 3
mathjax_path = "https://cdn.jsdelivr.net/npm/mathjax@4/tex-mml-chtml.js"

# single backticks in docstrings: a link where we have a page for it, code otherwise
default_role = "py:obj"
autodoc_typehints = "none"
autodoc_preserve_defaults = True
python_maximum_signature_line_length = 80
# several arguments may share a line
napoleon_use_param = False


def definitions(app, what, name, obj, options, lines):
    """Indented columns in a module's docstring, a word and what it means, as a list of definitions."""
    if what != "module":
        return
    column = max((_indent(line) for line in lines), default=0)
    result = []
    for line in lines:
        if not line.startswith("    ") or column <= 4:
            result.append(line)
            continue
        term, meaning = line[4:column].strip(), line[column:].strip()
        if term and line[column - 1] != " ":
            # a term that is longer than its column, alone on its line
            term, meaning = line.strip(), ""
        if term:
            result += ["", f"``{term}``"]
        if meaning:
            result.append(f"    {meaning}")
    lines[:] = result


def _indent(line):
    return len(line) - len(line.lstrip())


def setup(app):
    app.connect("autodoc-process-docstring", definitions)
