"""Formulas as MathML, which browsers draw by themselves: a page loads no script and asks no other host."""

import re

from docutils import nodes
from latex2mathml.converter import convert
from sphinx.util import logging

logger = logging.getLogger(__name__)


def mathml(latex, display="inline"):
    """A formula as MathML; raises ValueError where part of it was not understood."""
    if display == "block" and "\\\\" in latex:
        # lines and their alignment marks, as sphinx reads them
        latex = rf"\begin{{split}}{latex}\end{{split}}"
    result = convert(latex, display=display).replace(r"\_", "_")
    unknown = re.findall(r"\\[A-Za-z]*", result)
    if unknown:
        raise ValueError(f"latex2mathml does not know {' '.join(unknown)}; write it in another way")
    # names of functions are names, not operators with space around them
    result = re.sub(r"<mo>([A-Za-z]+)</mo>", r"<mi>\1</mi>", result)
    # the bars of a norm belong to what they enclose
    return result.replace("<mo>&#x02016;</mo>", '<mo stretchy="false" lspace="0" rspace="0">&#x02016;</mo>')


def _rendered(node, display):
    try:
        return mathml(node.astext(), display)
    except Exception as error:
        # latex2mathml has many classes of errors; any of them is a formula that a reader would not see
        logger.warning("formula %r: %s", node.astext(), error, location=node)
        return ""


def inline(self, node):
    self.body.append(_rendered(node, "inline"))
    raise nodes.SkipNode


def block(self, node):
    self.body.append(f'<div class="formula">{_rendered(node, "block")}</div>')
    raise nodes.SkipNode


def setup(app):
    app.add_html_math_renderer("mathml", inline_renderers=(inline, None), block_renderers=(block, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
