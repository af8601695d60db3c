"""Without a GPU the triton engine runs in Triton's interpreter, on CPU tensors: the same kernels."""

import gc
import importlib.util
import os

import pytest
import torch

from tests import ranks

HAS_GPU = torch.cuda.is_available()
HAS_TRITON = importlib.util.find_spec("triton") is not None
if HAS_TRITON and not HAS_GPU:
    # before anything imports triton. With 0, kernels are compiled for an H200, and tests/ptx.py runs them
    os.environ.setdefault("TRITON_INTERPRET", "1")
    if os.environ["TRITON_INTERPRET"] == "1":
        from tests import interpreter  # noqa: F401
    else:
        from tests import h200

        h200.install()


# modules that can be imported only above, which have no doctests
collect_ignore = ["h200.py", "interpreter.py"]

# rules that properties are shown for in the interpreter, which takes a hundred times as long as other engines:
# it runs what they run. Numbers are compared for every rule
INTERPRETED = ("sgd-momentum", "adamw", "lamb")
ALL_RULES = "tests/test_numerics.py"


def _is_repetition(item):
    # it imports the library, which must find the variable set
    from tests import cases

    params = item.callspec.params if hasattr(item, "callspec") else {}
    if params.get("engine") != "triton":
        return False
    rows = [value for value in params.values() if isinstance(value, cases.Case)]
    if item.nodeid.startswith(ALL_RULES):
        return any(row not in cases.KINDS for row in rows)
    return any(row.name not in INTERPRETED for row in rows)


# files that take longest come first: of two processes that take one file after the other, neither then waits
# for the last one
LONGEST = (
    "test_family",
    "test_numerics",
    "test_torch_judge",
    "test_quality",
    "test_npu",
    "test_mixed_groups",
    "test_distributed",
    "test_one_pass",
    "test_lamb",
    "test_clip",
    "test_checkpoints",
    "test_ecosystem",
    "test_changes",
    "test_tracing",
    "test_sequences",
    "test_functional",
    "test_memory",
    "test_npu_scripts",
    "test_sharded_example",
    "test_bench_measures",
    "test_bench",
)


def _turn(item):
    name = item.path.stem
    return LONGEST.index(name) if name in LONGEST else len(LONGEST)


def pytest_collection_modifyitems(config, items):
    items.sort(key=_turn)
    repetitions = [item for item in items if _is_repetition(item)]
    if repetitions and not HAS_GPU:
        config.hook.pytest_deselected(items=repetitions)
        gone = {*map(id, repetitions)}
        items[:] = [item for item in items if id(item) not in gone]
    if not HAS_GPU:
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="no GPU here"))


def pytest_collection_finish(session):
    # tests/ptx.py looks for tensors among all objects; those of modules and tests are none
    gc.freeze()


@pytest.fixture(params=["torch", "cpu", "triton"])
def engine(request):
    if request.param == "triton" and not HAS_TRITON:
        pytest.skip("there is no Triton for this platform")
    if request.param == "triton" and HAS_GPU:
        pytest.skip("compiled, the triton engine takes no CPU tensors; the gpu tests run it")
    return request.param


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture
def one_thread():
    """Two that wait for each other at every small operation take seconds where the cores are shared."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def two():
    """Two processes that run functions."""
    with ranks.world(2) as world:
        yield world


@pytest.fixture(scope="module")
def four():
    with ranks.world(4) as world:
        yield world
