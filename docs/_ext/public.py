"""`.. public:: fusedstep.rules`: a table of everything public in a module, with links and first sentences."""

import importlib
from typing import ClassVar

from docutils.parsers.rst import directives
from docutils.statemachine import StringList
from sphinx.ext.autosummary import Autosummary


class Public(Autosummary):
    required_arguments = 1
    has_content = False
    # names that another table has
    option_spec: ClassVar = {"except": directives.unchanged}

    def run(self):
        module = importlib.import_module(self.arguments[0])
        other = self.options.pop("except", None)
        elsewhere = [] if other is None else importlib.import_module(other).__all__
        names = sorted(set(module.__all__) - set(elsewhere), key=str.lower)
        self.content = StringList([f"{module.__name__}.{name}" for name in names])
        self.options["nosignatures"] = None
        return super().run()


def setup(app):
    app.setup_extension("sphinx.ext.autosummary")
    app.add_directive("public", Public)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
