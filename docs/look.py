"""Opens the built site in headless Chromium: every page, desktop and phone, light and dark.

    make docs docs-look              # pictures in a new folder of /tmp, whose name is printed
    python docs/look.py start.html   # only of pages that are named

It ends with an error if an image or link is broken, if a page asks another host for anything or writes an error
to the console, or if a page is wider than a phone.
"""

import functools
import http.server
import itertools
import shutil
import sys
import tempfile
import threading
from pathlib import Path
from urllib.parse import urldefrag, urljoin, urlparse

from playwright.sync_api import sync_playwright

SITE = Path(__file__).parent / "_build" / "html"
WIDTHS = {"desktop": 1280, "phone": 390}
SCHEMES = ("light", "dark")
# Chromium's own connections are no page's
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]
FLAGS += ["--disable-component-update", "--disable-sync"]
# of a page that is taller, the beginning is enough to look at
TALLEST = 6000
# a wide table, block of code or formula scrolls by itself; anything else that leaves the window is cut off
IN_PAGE = """() => {
    const scrolls = e => e.tagName != "ARTICLE" && (
        ["auto", "scroll", "hidden"].includes(getComputedStyle(e).overflowX) || scrolls(e.parentElement));
    const leaves = e => e.getBoundingClientRect().right > innerWidth + 1 && !scrolls(e);
    return {
        wide: [...document.querySelectorAll("article *")].filter(leaves).map(e => e.outerHTML.slice(0, 80)),
        width: document.documentElement.scrollWidth,
        broken: [...document.images].filter(i => i.complete && !i.naturalWidth).map(i => i.src),
        links: [...document.querySelectorAll("a[href]")].map(a => a.href),
        ids: [...document.querySelectorAll("[id]")].map(e => e.id),
    };
}"""


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args):
        pass


def serve():
    """The address of the site, from a server that ends with this process."""
    handler = functools.partial(Quiet, directory=str(SITE))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f"http://127.0.0.1:{server.server_address[1]}/"


def visit(context, base, name, kind, folder):
    """What is wrong with one page, and its links and ids."""
    wrong = []
    tab = context.new_page()
    tab.on("request", lambda r: r.url.startswith((base, "data:")) or wrong.append(f"asks for {r.url}"))
    tab.on("response", lambda r: r.status < 400 or wrong.append(f"{r.status} for {r.url}"))
    tab.on("console", lambda m: m.type != "error" or wrong.append(f"console: {m.text}"))
    tab.on("pageerror", lambda e: wrong.append(f"script: {e}"))
    tab.goto(base + name, wait_until="load")
    # what scripts ask for once the page is there
    tab.wait_for_timeout(100)
    found = tab.evaluate(IN_PAGE)
    width = WIDTHS[kind[0]]
    if found["width"] > width:
        wrong.append(f"is {found['width']} wide")
    wrong += [f"wider than the window: {element}" for element in found["wide"]]
    wrong += [f"broken image {image}" for image in found["broken"]]
    picture = folder / f"{name.removesuffix('.html').replace('/', '-')}-{'-'.join(kind)}.png"
    tall = min(tab.evaluate("document.documentElement.scrollHeight"), TALLEST)
    tab.set_viewport_size({"width": width, "height": max(tall, 800)})
    tab.screenshot(path=picture)
    tab.close()
    return wrong, found


def broken_links(base, pages):
    """Links within the site that lead nowhere: a page that is not there, or a place in it."""
    for name, found in pages.items():
        for link in found["links"]:
            address, place = urldefrag(urljoin(base + name, link))
            if not address.startswith(base):
                continue
            target = urlparse(address).path.lstrip("/") or "index.html"
            if not (SITE / target).is_file():
                yield f"{name}: link to {target}, which is not there"
            elif place and target in pages and place not in pages[target]["ids"]:
                yield f"{name}: link to {target}#{place}, which is not there"


def main():
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        sys.exit("found no chromium; install it, on Debian: apt-get install chromium")
    if not (SITE / "index.html").exists():
        sys.exit(f"found no site in {SITE}; run `make docs` first")
    found = (path.relative_to(SITE) for path in SITE.rglob("*.html"))
    names = sys.argv[1:] or sorted(str(path) for path in found if path.parts[0] != "_static")
    folder, base = Path(tempfile.mkdtemp(prefix="fusedstep-site-")), serve()
    wrong, pages = [], {}
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=FLAGS)
        for kind in itertools.product(WIDTHS, SCHEMES):
            size = {"width": WIDTHS[kind[0]], "height": 800}
            context = browser.new_context(viewport=size, color_scheme=kind[1])
            for name in names:
                found, pages[name] = visit(context, base, name, kind, folder)
                wrong += [f"{name}, {' '.join(kind)}: {each}" for each in found]
            context.close()
        browser.close()
    wrong += broken_links(base, pages)
    print(f"{len(names)} pages, {len(WIDTHS) * len(SCHEMES)} pictures of each: {folder}")
    sys.exit("\n".join(dict.fromkeys(wrong)) if wrong else 0)


if __name__ == "__main__":
    main()
