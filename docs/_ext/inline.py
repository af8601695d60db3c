"""Pictures of ours become part of their page, so that they follow its light and dark."""

import re
from html import escape
from pathlib import Path

from docutils import nodes

FOLDER = "performance/"


def put_inline(app, doctree, docname):
    for image in list(doctree.findall(nodes.image)):
        if not image["uri"].startswith(FOLDER) or app.builder.format != "html":
            continue
        text = Path(app.srcdir, image["uri"]).read_text()
        # the colours of a picture that stands alone, which the page's own replace
        text = re.sub(r'<style class="alone">.*?</style>', "", text, flags=re.DOTALL)
        # as wide as the page wants it
        for size in ("width", "height"):
            text = re.sub(rf'(<svg[^>]*?) {size}="[^"]*"', r"\1", text, count=1)
        label = escape(image.get("alt", ""), quote=True)
        html = f'<figure class="picture" role="img" aria-label="{label}">{text}</figure>'
        parent = image.parent
        target = parent if isinstance(parent, nodes.paragraph) and len(parent) == 1 else image
        target.replace_self(nodes.raw("", html, format="html"))


def setup(app):
    app.connect("doctree-resolved", put_inline)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
