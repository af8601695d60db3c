"""`.. public:: fusedstep.rules`: a table of everything public in a module, with links and first sentences."""

import importlib
from typing import ClassVar

from docutils.parsers.rst import directives
from docutils.statemachine import StringList
from sphinx.ext.autosummary import Autosummary


class Public(Autosummary):
    required_arguments = 1
    has_content = False
    # `as`: the module that pages know the names by; `except`: a module whose names another table has
    option_spec: ClassVar = {"as": directives.unchanged, "except": directives.unchanged}

    def run(self):
        home, other = self.options.pop("as", self.arguments[0]), self.options.pop("except", None)
        names = set(importlib.import_module(self.arguments[0]).__all__)
        if other is not None:
            names -= set(importlib.import_module(other).__all__)
        self.content = StringList([f"~{home}.{name}" for name in sorted(names, key=str.lower)])
        self.options["nosignatures"] = None
        return super().run()


def setup(app):
    app.setup_extension("sphinx.ext.autosummary")
    app.add_directive("public", Public)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
