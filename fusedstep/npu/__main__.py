"""python -m fusedstep.npu script.py [arguments]: run a script written for torch_npu on this machine's device.

As `python script.py [arguments]` would: the same sys.argv, sys.path, __main__, exit code and traceback.
If the real torch_npu is installed, that is all it does.
"""

from __future__ import annotations

import importlib.machinery
import io
import os
import sys
from types import ModuleType, TracebackType

_USAGE = "usage: python -m fusedstep.npu script.py [arguments]"


def main() -> None:
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        found = f"{sys.argv[1]!r} is no script" if len(sys.argv) > 1 else "no script was given"
        sys.exit(_fail(f"{found}; name the Python file to run\n{_USAGE}"))
    del sys.argv[0]
    path = os.path.abspath(sys.argv[0])
    try:
        with io.open_code(path) as file:
            source = file.read()
    except OSError as error:
        sys.exit(_fail(f"cannot read {path!r}: {error.strerror}; name an existing Python file\n{_USAGE}"))
    # with -P there is no entry for the directory python -m was started in
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = os.path.dirname(path)

    from . import _stand_in

    if _stand_in.is_needed():
        _stand_in.install()
    run(path, source)


def run(path: str, source: bytes) -> None:
    """Run this source as the program, and keep its module: threads and exit handlers may still use it."""
    module = ModuleType("__main__")
    module.__file__, module.__loader__ = path, importlib.machinery.SourceFileLoader("__main__", path)
    sys.modules["__main__"] = module

    def without_our_frames(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        while trace is not None and trace.tb_frame.f_globals is not vars(module):
            trace = trace.tb_next
        sys.__excepthook__(kind, error.with_traceback(trace), trace)

    sys.excepthook = without_our_frames
    exec(compile(source, path, "exec"), vars(module))


def _fail(message: str) -> int:
    print(f"fusedstep.npu: {message}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    main()
