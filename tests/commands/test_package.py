"""What a user installs: wheel and sdist, built, and installed where there is no checkout."""

import ast
import email
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

import fusedstep

ROOT = Path(__file__).parents[2]
NIGHTLY = "2.16.0.dev20261101"


def command(*words, **options):
    """What it printed, if it ended well."""
    done = subprocess.run(words, capture_output=True, text=True, timeout=600, **options)
    assert done.returncode == 0, f"{words}: {done.stdout}\n{done.stderr}"
    return done.stdout


def clean_command(*words, **options):
    """The same, where Python finds nothing that only our environment points to."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    return command(*words, env=env, **options)


class Built(NamedTuple):
    sdist: Path
    wheel: Path

    def files_of_sdist(self):
        with tarfile.open(self.sdist) as file:
            return {name.partition("/")[2] for name in file.getnames()}

    def files_of_wheel(self):
        with zipfile.ZipFile(self.wheel) as file:
            return {*file.namelist()}

    def read(self, name):
        with zipfile.ZipFile(self.wheel) as file:
            return file.read(f"fusedstep-{fusedstep.__version__}.dist-info/{name}").decode()


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The sdist, and the wheel that is made from it."""
    folder = tmp_path_factory.mktemp("dist")
    command(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT, cwd=folder)
    (sdist,), (wheel,) = folder.glob("*.tar.gz"), folder.glob("*.whl")
    return Built(sdist, wheel)


@pytest.fixture(scope="module")
def clean(built, tmp_path_factory):
    """The Python of an environment with the wheel, and dependencies that are not downloaded again."""
    folder = tmp_path_factory.mktemp("clean")
    venv.create(folder, symlinks=True)
    python, (packages,) = folder / "bin" / "python", folder.glob("lib/python*/site-packages")
    # of the folders named here, files that lead elsewhere are not read: not the one that leads to this checkout
    (packages / "dependencies.pth").write_text("\n".join({*map(sysconfig.get_path, ("purelib", "platlib"))}))
    pip = sys.executable, "-m", "pip", "--python", python
    command(*pip, "install", "--quiet", "--no-deps", "--no-index", built.wheel)
    return python


@pytest.fixture(scope="module")
def metadata(built):
    return email.message_from_string(built.read("METADATA"))


# what is in them


def test_the_wheel_holds_the_package_and_nothing_else(built):
    of_package = {path for path in (ROOT / "fusedstep").rglob("*") if path.is_file()}
    expected = {str(path.relative_to(ROOT)) for path in of_package if "__pycache__" not in path.parts}
    information = f"fusedstep-{fusedstep.__version__}.dist-info/"
    found = {name for name in built.files_of_wheel() if not name.startswith(information)}
    assert found == expected
    assert "fusedstep/py.typed" in found
    assert f"{information}licenses/LICENSE" in built.files_of_wheel()
    assert built.wheel.name == f"fusedstep-{fusedstep.__version__}-py3-none-any.whl"


def test_the_sdist_holds_what_tests_and_pages_need_and_nothing_beside(built):
    found = built.files_of_sdist()
    assert {"LICENSE", "README.md", "SECURITY.md", "tests/cases.py", "tests/recorded/family.json"} <= found
    assert {"examples/gpt.py", "docs/index.md", "fusedstep/cli/sonnets.txt", "Makefile"} <= found
    # those that the Makefile installs
    assert {path.name for path in ROOT.glob("requirements-*.txt")} <= found
    folders = {name.partition("/")[0] for name in found if "/" in name}
    assert folders == {"fusedstep", "tests", "examples", "docs", "benchmarks"}
    assert not [name for name in found if "__pycache__" in name or "_build" in name]


def test_the_metadata_says_what_is_true(metadata):
    assert metadata["Version"] == fusedstep.__version__
    assert metadata["License-Expression"] == "Apache-2.0"
    # none that a reader would find empty
    assert metadata["Project-URL"] is metadata["Home-page"] is None
    assert metadata.get_payload().startswith("# fusedstep")


def test_the_version_is_the_newest_of_the_changelog_or_the_next_in_development():
    text = (ROOT / "CHANGELOG.md").read_text()
    newest, *_ = re.findall(r"^## (\d\S*)", text, re.MULTILINE)
    version = Version(fusedstep.__version__)
    # the heading, underlined or not, for what comes after the newest version
    has_more = re.search(r"^(## )?Unreleased$", text, re.MULTILINE) is not None
    assert version.is_devrelease == has_more
    assert version > Version(newest) if has_more else version == Version(newest)


def versions(metadata):
    classifiers = metadata.get_all("Classifier")
    return [c.rpartition(" ")[2] for c in classifiers if re.fullmatch(r".*Python :: 3\.\d+", c)]


def test_the_oldest_python_is_the_same_everywhere(metadata):
    oldest, *_ = versions(metadata)
    assert metadata["Requires-Python"] == f">={oldest}"
    settings = (ROOT / "pyproject.toml").read_text()
    assert f'python_version = "{oldest}"' in settings
    assert f'target-version = "py{oldest.replace(".", "")}"' in settings


@pytest.mark.parametrize("version", ["3.10", "3.11", "3.12", "3.13"])
def test_every_file_is_of_every_python_that_is_named(version, metadata):
    assert version in versions(metadata)
    python = shutil.which(f"python{version}")
    # pyenv leaves commands for versions that are not switched on, and these fail
    if python is None or subprocess.run([python, "--version"], capture_output=True).returncode:
        pytest.skip(f"there is no Python {version} here")
    files = [str(p) for folder in ("fusedstep", "tests", "examples") for p in (ROOT / folder).rglob("*.py")]
    compiles = "import sys; [compile(open(f, encoding='utf-8').read(), f, 'exec') for f in sys.argv[1:]]"
    command(python, "-c", compiles, *files)


# once installed


def test_it_works_as_installed_without_a_warning(clean, tmp_path):
    script = """
        import doctest, fusedstep, fusedstep.functional, fusedstep.npu, torch

        assert not doctest.testmod(fusedstep).failed
        p = torch.nn.Parameter(torch.ones(5000))
        p.grad = torch.ones(5000)
        for engine in ("cpu", "torch"):
            fusedstep.AdamW([p], lr=0.25, max_grad_norm=1.0, state_dtype="int8", engine=engine).step()
        print(fusedstep.__file__, p.sum().item())
    """
    printed = clean_command(clean, "-W", "error", "-c", _dedented(script), cwd=tmp_path)
    path, total = printed.split()
    assert Path(path).is_relative_to(clean.parent.parent)
    assert float(total) == pytest.approx(2500, rel=0.02)


def test_its_command_works_as_installed(clean, tmp_path):
    helps = clean_command(clean.parent / "fusedstep", "--help", cwd=tmp_path)
    assert all(name in helps for name in ("demo", "bench", "memory"))
    printed = clean_command(clean.parent / "fusedstep", "memory", "--model", "resnet-50", cwd=tmp_path)
    assert "25,557,032 parameters" in printed


def test_what_extras_bring_is_not_needed_for_a_step(clean, metadata, tmp_path):
    requirements = [Requirement(each) for each in metadata.get_all("Requires-Dist")]
    extras = {r.name.replace("-", "_") for r in requirements if r.marker} | {"triton"}
    assert {"typer", "matplotlib", "lightning"} <= extras
    script = f"""
        import sys
        sys.modules.update(dict.fromkeys({sorted(extras - {"packaging", "psutil"})}))
        import fusedstep, torch

        p = torch.nn.Parameter(torch.ones(5))
        p.grad = torch.ones(5)
        fusedstep.AdamW([p]).step()
        try:
            import fusedstep.cli.__main__
        except SystemExit as error:
            print(error)
    """
    printed = clean_command(clean, "-c", _dedented(script), cwd=tmp_path)
    assert printed == "the command line needs its extras: pip install 'fusedstep[cli]'\n"


def _dedented(script):
    return "\n".join(line[8:] for line in script.splitlines())


# versions of others


def test_a_nightly_torch_satisfies_the_requirement(metadata):
    for requirement in map(Requirement, metadata.get_all("Requires-Dist")):
        if requirement.name == "torch" and requirement.marker is None:
            # as pip asks of what is installed
            assert requirement.specifier.contains(NIGHTLY, prereleases=True)
            assert not requirement.specifier.contains("2.10.0")
            assert requirement.specifier == SpecifierSet(">=2.11")


def test_everything_is_imported_and_steps_with_a_nightly_torch(clean, tmp_path):
    script = f"""
        import importlib.util, pkgutil, torch
        torch.__version__ = torch.torch_version.TorchVersion("{NIGHTLY}+cpu")
        import fusedstep

        modules = [module.name for module in pkgutil.walk_packages(fusedstep.__path__, "fusedstep.")]
        has_triton = importlib.util.find_spec("triton") is not None
        for name in modules:
            # plugs need what they plug into
            needs_triton = ".triton" in name or name.endswith(".kernels") and ".stages." in name
            if "__main__" not in name and ".integrations." not in name and (has_triton or not needs_triton):
                importlib.import_module(name)
        p = torch.nn.Parameter(torch.ones(5))
        p.grad = torch.ones(5)
        for engine in ("cpu", "torch"):
            fusedstep.Lamb([p], engine=engine).step()
    """
    clean_command(clean, "-W", "error", "-c", _dedented(script), cwd=tmp_path)


@pytest.mark.parametrize("path", sorted((ROOT / "fusedstep").rglob("*.py")), ids=lambda p: p.stem)
def test_nothing_is_decided_by_a_version(path):
    """What is there is asked for by name: versions of nightlies and forks do not say."""
    for node in ast.walk(ast.parse(path.read_text())):
        # it may be printed, and compared with nothing
        if isinstance(node, ast.Compare):
            names = {getattr(each, "attr", getattr(each, "id", "")) for each in ast.walk(node)}
            assert not names & {"__version__", "version_info"}, f"{path}:{node.lineno}"
        elif isinstance(node, ast.Call):
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            assert name not in ("Version", "LooseVersion", "TorchVersion"), f"{path}:{node.lineno}"


def test_the_torch_of_the_tests_is_one_that_is_supported():
    row = re.search(r"\| yes \| (\S+) to (\S+) \| (\S+) to (\S+) \|", (ROOT / "SECURITY.md").read_text())
    first, last, *pythons = row.groups()
    release = ".".join(torch.__version__.split(".")[:2])
    assert SpecifierSet(f">={first},<={last}").contains(release)
    assert SpecifierSet(f">={pythons[0]},<={pythons[1]}").contains("{}.{}".format(*sys.version_info))
