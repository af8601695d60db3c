"""`fusedstep bench` beside timm's Lamb where timm itself cannot be imported.

    pip install '.[cli,peers]'
    python benchmarks/beside_timm.py bench --device cpu --rounds 15 --output benchmarks

timm imports all its models, and these torchvision, which does not load beside every build of torch. Its
optimizers need neither: they are imported from their own files, without what the packages around them import.
"""

import importlib.util
import sys
import types
from pathlib import Path

from fusedstep.cli.__main__ import app


def main() -> None:
    found = importlib.util.find_spec("timm")
    if found is None or found.origin is None:
        raise SystemExit("timm is not installed; pip install '.[cli,peers]'")
    folder = Path(found.origin).parent
    for name, path in (("timm", folder), ("timm.optim", folder / "optim")):
        package = types.ModuleType(name)
        package.__path__ = [str(path)]
        package.__spec__ = importlib.util.spec_from_file_location(
            name, path / "__init__.py", submodule_search_locations=[str(path)]
        )
        sys.modules[name] = package
    from timm.optim.lamb import Lamb

    sys.modules["timm.optim"].Lamb = Lamb  # type: ignore[attr-defined]
    app()


if __name__ == "__main__":
    main()
