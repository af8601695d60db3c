"""Links to source files lead to pages with their text: a browser would only save the files. And links in files
that pages include lead to where they lead in the repository.
"""

import posixpath
import re
from pathlib import Path

from docutils import nodes
from sphinx import addnodes

ROOT = Path(__file__).parents[2]
# a link to a file, by its path from the file with the link
LINK = re.compile(r"\]\(([\w./-]+\.\w+)(?=[#)])")
# files that pages of the site include
PAGES = {
    "../CHANGELOG.md": "changelog.md",
    "../SECURITY.md": "security.md",
    "../benchmarks/MEASURED.md": "notebook.md",
    "../examples/README.md": "examples.md",
}


def links_from_page(app, path, docname, source):
    def from_page(link):
        target = posixpath.normpath(posixpath.join(path.parent.as_posix(), link[1]))
        return f"]({PAGES.get(target, target)}"

    source[0] = LINK.sub(from_page, source[0])


def link_to_pages(app, doctree):
    if app.builder.format != "html":
        return
    docname = app.env.docname
    shown = app.env.metadata[docname].setdefault("sources", [])
    for node in list(doctree.findall(addnodes.download_reference)):
        path = Path(app.env.relfn2path(node["reftarget"], docname)[1]).resolve()
        if path.suffix == ".py":
            name = path.relative_to(ROOT).as_posix()
            shown.append(name)
            uri = app.builder.get_relative_uri(docname, f"sources/{name}")
            node.replace_self(nodes.reference("", "", *node.children, refuri=uri, internal=True))


def source_pages(app):
    for name in sorted({name for facts in app.env.metadata.values() for name in facts.get("sources", ())}):
        text = app.builder.highlighter.highlight_block((ROOT / name).read_text(), "python")
        yield f"sources/{name}", {"title": name, "body": f"<h1>{name}</h1>{text}"}, "page.html"


def setup(app):
    app.connect("include-read", links_from_page)
    # before Sphinx copies what is left to be saved
    app.connect("doctree-read", link_to_pages, priority=100)
    app.connect("html-collect-pages", source_pages)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
