"""What a module may use: layers below its own, public calls, and no memory but by code that we compiled."""

import ast
import functools
import importlib
import operator
import sys
from pathlib import Path

import pytest
import torch

import fusedstep
from fusedstep._engines import ABSENT, CHANGED, MOVED, OTHER, SAME
from fusedstep._engines.cpu import dlpack
from fusedstep._memory import shards, watch

ROOT = Path(fusedstep.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
# from what users import down to what imports nothing of ours
LAYERS = ("", "_torch", "_memory", "_engines", "_algorithm")


def name_of(path):
    return str(path.relative_to(ROOT))


files = pytest.mark.parametrize("path", FILES, ids=name_of)


@functools.cache
def nodes(path):
    return [*ast.walk(ast.parse(path.read_text(), str(path)))]


def layer_of(module):
    """The number of the layer that a module is in, by its parts after `fusedstep`."""
    return LAYERS.index(module[0]) if module and module[0] in LAYERS else 0


def module_of(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return parts[:-1] if parts[-1] == "__init__" else parts


def imports(path):
    """Everything a file imports, anywhere in it, as absolute dotted names."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    package = ("fusedstep", *parts[:-1])
    found = []
    for node in nodes(path):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*base, *([node.module] if node.module else [])])
            found += [f"{module}.{alias.name}" for alias in node.names]
    return found


@files
def test_imports_go_down_only(path):
    here = layer_of(module_of(path))
    for name in imports(path):
        parts = name.split(".")
        if parts[0] == "fusedstep":
            there = layer_of(parts[1:])
            # all names of what users import are in one layer, and nothing below knows of it
            assert there >= here, f"{name_of(path)} imports {name}, from a layer above"


@pytest.mark.parametrize("path", sorted((ROOT / "_algorithm").rglob("*.py")), ids=name_of)
def test_what_is_computed_needs_the_standard_library_only(path):
    # how it is stored is a matter of torch's dtypes, and stages work on its tensors
    allowed = {"torch"} if path.name in ("formats.py", "program.py", "stage.py") else set()
    for name in imports(path):
        top = name.split(".")[0]
        assert top in {*sys.stdlib_module_names} | allowed or name.startswith("fusedstep._algorithm"), name


# the only files that may call by address: what llvmlite compiled, OpenMP's entry point; what is compiled calls
# libm, in two files CPython's C interface, and in dlpack.py torch's table for DLPack
CALLS_BY_ADDRESS = "_engines/cpu/"
CALLS_CPYTHON = {"_engines/cpu/dlpack.py", "_engines/cpu/objects.py"}
# ways to read or write memory that Python does not offer
RAW_MEMORY = {
    "from_address",
    "from_buffer",
    "from_buffer_copy",
    "string_at",
    "memmove",
    "memset",
    "addressof",
    "offsetof",
    "pythonapi",
    "py_object",
    "_cdata",
    "_obj",
    "unpack_from",
    "pack_into",
}


@files
def test_no_memory_is_read_or_written_by_address(path):
    tops = {name.split(".")[0] for name in imports(path)}
    assert not tops & {"struct", "cffi", "mmap", "_ctypes"}
    assert "ctypes" not in tops or name_of(path).startswith(CALLS_BY_ADDRESS)
    # objects are handed to what we compiled, as to any extension module
    refused = RAW_MEMORY - ({"py_object"} if name_of(path) in CALLS_CPYTHON else set())
    for node in nodes(path):
        used = getattr(node, "attr", None) or getattr(node, "id", None)
        assert used not in refused, f"{name_of(path)}:{node.lineno} uses {used}"
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            # a number is made a pointer in compiled code only
            assert node.func.attr != "POINTER" or name_of(path).startswith(CALLS_BY_ADDRESS)


def is_id(node):
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "id"


@files
def test_an_identity_is_no_address(path):
    """Objects may be told apart by `id`; nothing is computed from it, and it is handed to nobody."""
    for node in nodes(path):
        if isinstance(node, ast.BinOp):
            assert not is_id(node.left)
            assert not is_id(node.right)
        if isinstance(node, ast.Call) and not is_id(node):
            handed = [*node.args, *(keyword.value for keyword in node.keywords)]
            receiver = getattr(node.func, "attr", "")
            assert receiver in ("get", "add", "index", "pop", "setdefault") or not any(map(is_id, handed))


# what is private to torch, and why we use it all the same
PRIVATE = {
    # to_local() is an operation that autograd records, for each tensor and at every step
    "torch.distributed.tensor.DTensor._local_tensor": "the part of a DTensor that is here",
    "torch.distributed.tensor.DTensor._spec": "how it is distributed; without it, placements are compared",
    "torch.distributed.tensor._dtensor_spec.DTensorSpec": "states of DTensors, as FSDP2 makes parameters",
    "torch.distributed.tensor._dtensor_spec.TensorMeta": "the same",
    # an attribute that FSDP1 sets: without it, nothing is flat
    "_fsdp_flattened": "parameters that FSDP1 has joined and cut",
    "torch._foreach_copy_": "lists in one call, as torch.optim does; see test_lists.py for those found by name",
    "torch._foreach_mul": "the same",
    "torch._foreach_norm": "the same",
    "torch._foreach_zero_": "the same",
    "torch.Tensor._version": "whether somebody wrote a step count; torch's own notes on autograd name it",
    "torch._C._len_torch_dispatch_stack": "whether somebody is shown every operation",
    "torch._C._functorch": "whether a transformation such as vmap is",
    "torch._C._get_dispatch_mode": "whether operations are traced",
    "torch._C._TorchDispatchModeKey": "the same",
    "torch._C._dispatch_tls_is_dispatch_key_included": "whether torch.export is shown them",
    "torch._subclasses.fake_tensor.FakeTensor": "tensors without numbers",
    "torch._disable_dynamo": "torch.compile steps as torch.optim's optimizers do, outside of its graphs",
    "torch.autograd._profiler_enabled": "whether step() is to be seen in a profile",
    "torch.cuda._sleep": "`fusedstep bench` fills the device's queue while the host is timed",
    # what torch's own optimizers are made of
    "torch.optim.optimizer._get_scalar_dtype": "the dtype of step counts",
    "torch.optim.optimizer._global_optimizer_pre_hooks": "whether anybody has hooked all optimizers",
    "torch.optim.optimizer._global_optimizer_post_hooks": "the same",
    "torch.optim.Optimizer._optimizer_step_pre_hooks": "whether anybody has hooked this one",
    "torch.optim.Optimizer._optimizer_step_post_hooks": "the same",
    "torch.optim.Optimizer._step_supports_amp_scaling": "how a GradScaler is told who unscales",
    "torch.amp.GradScaler._check_scale_growth_tracker": "ours is torch's, but for who looks at gradients",
    "torch.amp.GradScaler._get_scale_async": "the same",
    "torch.amp.GradScaler._per_optimizer_states": "the same",
    "torch.amp.GradScaler._scale": "the same",
}
# set by instances, or by nobody in a torch without it: no attribute of a class or module
_OF_INSTANCES = {"_local_tensor", "_spec", "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"} | {
    "_per_optimizer_states",
    "_scale",
    "_step_supports_amp_scaling",
    "_fsdp_flattened",
}
# of named tuples, documented
_PUBLIC = {"_replace", "_asdict", "_fields", "_make"}


_BY_STRING = ("getattr", "hasattr", "setattr", "delattr", "attrgetter", "methodcaller")


def is_private(name):
    return name.startswith("_") and not name.startswith("__") and name not in _PUBLIC and name != "_"


@functools.cache
def own_names():
    """Private names that the library itself gives to something."""
    found = set()
    for node in (node for path in FILES for node in nodes(path)):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found.add(node.attr)
        elif isinstance(node, ast.arg):
            found.add(node.arg)
    modules = {part for path in FILES for part in module_of(path)}
    return found | modules


def foreign_names(path):
    """Private names that a file uses, and that are not the library's."""
    used = set()
    for node in nodes(path):
        if isinstance(node, ast.Attribute):
            used.add(node.attr)
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in _BY_STRING:
            used |= {a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str)}
    for name in imports(path):
        if not name.startswith("fusedstep"):
            parts = name.split(".")
            # what is imported from a private module is private
            used |= {parts[-1]} if any(map(is_private, parts)) else set()
    from_private = {p.split(".")[-1] for p in PRIVATE} | {p for p in used if is_private(p)}
    return {name for name in used & from_private if name not in own_names() - set(_KNOWN)}


# by their last part, and by the parts before it
_KNOWN = {path.split(".")[-1]: path for path in PRIVATE}
_ON_THE_WAY = {part for path in PRIVATE for part in path.split(".")[:-1] if is_private(part)}


@files
def test_private_names_of_torch_are_listed_with_a_reason(path):
    unknown = {name for name in foreign_names(path) if name not in _KNOWN and name not in _ON_THE_WAY}
    assert not unknown, f"{name_of(path)} uses {sorted(unknown)}: find a public way, or list them in PRIVATE"


def test_nothing_is_listed_that_is_not_in_use():
    used = set().union(*(foreign_names(path) for path in FILES))
    assert sorted(_KNOWN.keys() - used) == []


def found(path):
    """What a dotted name stands for: attributes of the longest part that is a module."""
    parts = path.split(".")
    for i in reversed(range(1, len(parts))):
        try:
            module = importlib.import_module(".".join(parts[:i]))
        except ImportError:
            continue
        return operator.attrgetter(".".join(parts[i:]))(module)
    raise ImportError(path)


@pytest.mark.parametrize("path", [path for path in PRIVATE if path.split(".")[-1] not in _OF_INSTANCES])
def test_torch_has_what_is_listed(path):
    """Fails with the first torch that does not: then see whether there is another way."""
    assert found(path) is not None


def test_instances_have_what_is_listed_of_them():
    p = torch.nn.Parameter(torch.ones(1))
    optimizer, scaler = torch.optim.SGD([p]), torch.amp.GradScaler("cpu")
    for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        assert hasattr(optimizer, name)
    assert hasattr(scaler, "_per_optimizer_states")
    # torch's scaler asks for it by this name
    assert torch.optim.AdamW([p], fused=True)._step_supports_amp_scaling


def test_a_dtensor_has_its_part_here(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        from torch.distributed.tensor import Replicate, distribute_tensor, init_device_mesh

        mesh = init_device_mesh("cpu", (1,))
        t = distribute_tensor(torch.ones(3), mesh, [Replicate()])
        assert torch.equal(t._local_tensor, t.to_local())
        assert shards.local(t) is t._local_tensor
        state = shards.like(torch.zeros(3), t)
        assert shards.lies_alike(state, t)
    finally:
        torch.distributed.destroy_process_group()


def test_dlpack_is_used():
    """Found missing, Python asks, which takes 50 times as long, and nobody would know."""
    assert dlpack.table() is not None


def test_a_table_that_is_not_dlpacks_is_refused(monkeypatch):
    capsule = torch.Tensor.__dlpack_c_exchange_api__
    monkeypatch.setattr(dlpack, "_MAJOR", 2)
    with pytest.raises(RuntimeError, match=r"DLPack 1\.\d+ is not known here"):
        dlpack.Table(capsule)
    monkeypatch.undo()
    monkeypatch.setattr(dlpack, "_NAME", b"dltensor")
    with pytest.raises(ValueError, match="PyCapsule_GetPointer"):
        dlpack.Table(capsule)
    # which is no reason to fail
    dlpack.table.cache_clear()
    assert dlpack.table() is None
    dlpack.table.cache_clear()


@pytest.fixture(params=["compiled", "python"])
def looks(request, monkeypatch):
    """A look at tensors like these, as it is here, and where torch has no table for DLPack."""
    if request.param == "python":
        monkeypatch.setattr(watch, "_table", lambda: None)
    monkeypatch.setattr(watch, "_kinds", {})
    return lambda tensors: watch.Look(watch.kinds_of(tensors))


def tensor(**changes):
    made = torch.zeros(4, 3, dtype=changes.get("dtype", torch.float32))
    return made[:, :2] if "shape" in changes else made.t().contiguous().t() if "strides" in changes else made


@pytest.mark.parametrize("change", [{"dtype": torch.float64}, {"shape": 1}, {"strides": 1}], ids=str)
def test_both_looks_tell_the_same_kinds_apart(looks, change):
    tensors = [tensor(), tensor()]
    look = looks(tensors)
    assert look(tensors) == MOVED
    assert look(tensors) == SAME
    assert look.addresses.tolist() == [t.data_ptr() for t in tensors]
    others = [tensor(), tensors[1]]
    assert look(others) == MOVED
    assert look([tensors[0], tensor(**change)]) == CHANGED
    assert look.addresses.tolist() == [tensors[0].data_ptr(), OTHER]
    assert look([tensor(**change), tensors[1]]) == CHANGED
    assert look(tensors) == MOVED


STRANGERS = {
    "negated": lambda t: torch._neg_view(t),
    "a subclass": lambda t: torch.nn.Parameter(t),
    "without memory": lambda t: t.to("meta"),
    "sparse": lambda t: t.to_sparse(),
    "lazy zeros": lambda t: torch._efficientzerotensor(3),
    "emptied": lambda t: (t.untyped_storage().resize_(0) and None) or t,
    "no tensor": lambda t: 1.0,
    "none": lambda t: None,
}


@pytest.mark.parametrize("stranger", STRANGERS)
def test_both_looks_notice_what_is_none_of_them(looks, stranger):
    tensors = [torch.ones(3), torch.ones(3)]
    look = looks(tensors)
    assert look(tensors) == MOVED
    assert look([tensors[0], STRANGERS[stranger](torch.ones(3))]) == CHANGED
    assert look.addresses.tolist() == [tensors[0].data_ptr(), OTHER]


def test_a_gradient_that_is_negated_in_place_is_noticed(looks):
    t = torch.ones(3)
    look = watch.Look([watch.kind_of(t), watch.NOTHING], absent=ABSENT, changes_sign=True)
    assert look([t, None]) == MOVED
    assert look([t, None]) == SAME
    t.data = torch._neg_view(t.data)
    assert look([t, None]) == CHANGED
    assert look.addresses.tolist() == [OTHER, ABSENT]


def test_a_look_has_a_lazy_clone_get_memory_of_its_own(looks):
    t = torch.ones(3)
    look = looks([t])
    clone = torch._lazy_clone(t)
    look([t])
    t.numpy()[:] = 2.0
    assert clone.tolist() == [1.0] * 3
