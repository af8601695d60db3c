"""Optimizers that have a reference implementation, against runs of that: see recorded/record_family.py."""

import ast
import copy
import json
import math
import statistics
from pathlib import Path

import pytest
import torch

import fusedstep
from fusedstep import npu
from fusedstep.rules import abs, for_all, rule, total_over_all
from tests import cases
from tests.cases import FAMILY

RECORDED = json.loads((Path(__file__).parent / "recorded" / "family.json").read_text())
SHAPES = [(3, 4), (5,), (2, 3, 2, 2)]
# options of references by our names; None: ours has nothing of the kind
NAMES = {
    "caution": "cautious",
    "corrected_weight_decay": "corrected_decay",
    "decoupled": "decouple",
    "clip_lambda": "clip_exp",
    "amsgrad": "amsgrad",
}
# what a reference always does, in our words
ALWAYS = {
    "timm.optim.NvNovoGrad": {
        "betas": [0.95, 0.98],
        "bias_correction": False,
        "reg_inside_moment": True,
        "grad_averaging": False,
    },
    "timm.optim.Adopt": {"clip_exp": 0.333},
    "optimi.StableAdamW": {"eps": 1e-6},
}
# of other libraries' variants those that are not ours: another decay, another mean of what agrees, a bug
NOT_OURS = {
    "lion_pytorch.Lion": ("decoupled_weight_decay",),
    "timm.optim.Lion": ("corrected_weight_decay",),
    "pytorch_optimizer.Lion": ("cautious",),
    "timm.optim.NvNovoGrad": ("amsgrad",),
    "timm.optim.Adopt": ("caution", "corrected_weight_decay"),
    "optimi.StableAdamW": ("decouple_lr",),
    "timm.optim.Adan": ("caution",),
    "pytorch_optimizer.Adan": ("maximize", "max_grad_norm"),
    "pytorch_optimizer.AdEMAMix": ("cautious", "stable_adamw", "fixed_decay"),
}
WITHOUT = ("pytorch_optimizer.NovoGrad", "pytorch_optimizer.ADOPT", "pytorch_optimizer.AdamC")


def ours_of(case):
    """The options of our class, or None where it does something else on purpose."""
    reference, options = case["reference"], dict(case["options"])
    if reference in WITHOUT or any(options.get(name) for name in NOT_OURS.get(reference, ())):
        return None
    if options.get("caution") and options.get("amsgrad"):
        return None
    if reference == "pytorch_optimizer.AdEMAMix":
        if options.get("weight_decay") and not options.pop("weight_decouple", False):
            return None
        options.pop("weight_decouple", None)
    if reference == "pytorch_optimizer.StableAdamW" and not options.pop("weight_decouple", True):
        return None
    if reference == "pytorch_optimizer.Lion" and not options.pop("weight_decouple", True):
        return None
    if reference == "timm.optim.Lamb" and options.pop("trust_clip", False):
        options["trust_bounds"] = (0.0, 1.0)
    if reference == "pytorch_optimizer.Adan":
        options["no_prox"] = options.pop("weight_decouple", False)
    return {**ALWAYS.get(reference, {}), **{NAMES.get(name, name): value for name, value in options.items()}}


def class_of(case):
    module, _, name = case["optimizer"].rpartition(".")
    return getattr(npu if module else fusedstep, name)


CASES = [case for case in RECORDED["cases"] if ours_of(case) is not None]


def name_of(case):
    options = "-".join(f"{name}={value}" for name, value in case["options"].items())
    parts = case["reference"], options, "wave" * case["wave"], case["default_dtype"].removeprefix("float")
    return "-".join(filter(None, parts))


def start(dtype=torch.float64):
    for k, shape in enumerate(SHAPES):
        i = torch.arange(math.prod(shape), dtype=torch.float64)
        yield torch.nn.Parameter((1.0 + 0.7 * i + 2.1 * k).sin().reshape(shape).to(dtype))


def gradient(p, k, t):
    i = torch.arange(p.numel(), dtype=torch.float64).reshape(p.shape)
    pull = 0.3 * (p.detach().double() - (0.3 * i + k).cos())
    return (pull + 0.5 * (0.9 * t + 1.7 * i + 0.4 * k).sin()).to(p.dtype)


def run(optimizer, params, steps, wave=False):
    """Parameters after every step."""
    rate = optimizer.param_groups[0]["lr"]
    for t in range(1, steps + 1):
        if wave:
            optimizer.param_groups[0]["lr"] = rate * (1 + 0.5 * math.sin(0.1 * t))
        for k, p in enumerate(params):
            p.grad = gradient(p, k, t)
        optimizer.step()
        yield t


@pytest.fixture
def default_dtype():
    before = torch.get_default_dtype()
    yield torch.set_default_dtype
    torch.set_default_dtype(before)


def close_to(params, recorded, tolerance):
    for p, numbers in zip(params, recorded, strict=True):
        expected = torch.tensor(numbers, dtype=torch.float64)
        torch.testing.assert_close(p.detach().double().flatten(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_a_hundred_steps_are_those_of_the_reference(case, engine, default_dtype):
    first = next(c for c in CASES if (c["optimizer"], c["wave"]) == (case["optimizer"], case["wave"]))
    if engine == "triton" and case is not first:
        pytest.skip("the interpreter takes long")
    default_dtype(getattr(torch, case["default_dtype"]))
    params = [*start()]
    optimizer = class_of(case)(params, engine=engine, **ours_of(case))
    # some keep a number of each tensor in float32
    keeps = case["optimizer"] in ("NAdam", "ASGD", "NovoGrad") and case["default_dtype"] == "float32"
    for t in run(optimizer, params, 10 if engine == "triton" else 100, case["wave"]):
        if str(t) in case["params"]:
            close_to(params, case["params"][str(t)], 1e-6 if keeps else 1e-9)
    if "eval" in case and engine != "triton":
        optimizer.eval()
        close_to(params, case["eval"], 1e-9)


ONCE = [*{(case["optimizer"], case["wave"]): case for case in reversed(CASES)}.values()]


@pytest.mark.gpu
@pytest.mark.parametrize("case", ONCE, ids=name_of)
def test_a_gpu_takes_the_steps_of_the_reference(case, default_dtype):
    default_dtype(getattr(torch, case["default_dtype"]))
    params = [torch.nn.Parameter(p.detach().cuda()) for p in start()]
    optimizer = class_of(case)(params, **ours_of(case))
    rate = optimizer.param_groups[0]["lr"]
    keeps = case["optimizer"] in ("NAdam", "ASGD", "NovoGrad") and case["default_dtype"] == "float32"
    for t in range(1, 101):
        if case["wave"]:
            optimizer.param_groups[0]["lr"] = rate * (1 + 0.5 * math.sin(0.1 * t))
        for k, p in enumerate(params):
            p.grad = gradient(p.cpu(), k, t).cuda()
        optimizer.step()
        if str(t) in case["params"]:
            close_to([p.cpu() for p in params], case["params"][str(t)], 1e-6 if keeps else 1e-9)


# of every class, and of those with a case, the first
ROWS = [*FAMILY, *((cls, next(c.options for c in cases.CASES if c.ours is cls)) for cls in cases.CLASSES)]
rows = pytest.mark.parametrize(
    ("cls", "options"), ROWS, ids=lambda x: x.__name__ if isinstance(x, type) else str(x)
)


def test_there_is_a_row_of_every_class():
    # matrices are compared in test_muon.py
    assert {cls.__name__ for cls, _ in ROWS} == {*fusedstep.optimizers.__all__} - {"Muon"}
    with pytest.raises(TypeError, match="Muon has stages between its sweeps"):
        fusedstep.check_rule(fusedstep.Muon)


@rows
def test_fifty_steps_on_every_engine_are_what_a_rule_says(cls, options, engine):
    # the interpreter takes long; on a GPU it is fifty, too
    report = fusedstep.check_rule(cls, steps=3 if engine == "triton" else 50, engine=engine, **options)
    assert report, report
    assert [row.engine for row in report.rows] == [engine] * 2


@pytest.mark.gpu
@rows
def test_fifty_steps_on_a_gpu_are_what_a_rule_says(cls, options):
    report = fusedstep.check_rule(cls, steps=50, **options)
    assert report, report
    assert ("triton", "cuda") in {(row.engine, row.device) for row in report.rows}


FOLDER = Path(fusedstep.optimizers.__file__).parent


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.py")), ids=lambda path: path.name)
def test_optimizers_are_written_with_what_everybody_has(path):
    """From the library they import `fusedstep.rules`, and each other."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            assert node.level == 1 or node.module == "rules"
            assert not any(part.startswith("_") for part in (node.module or "").split("."))
        assert not (isinstance(node, (ast.Import, ast.ImportFrom)) and "fusedstep" in ast.unparse(node))


def lines_of(nodes):
    return len({line for node in nodes for line in range(node.lineno, node.end_lineno + 1)})


def test_a_rule_takes_six_lines_and_a_class_fifteen():
    found = [node for path in FOLDER.glob("*.py") for node in ast.parse(path.read_text()).body]
    functions = [n for n in found if isinstance(n, ast.FunctionDef)]
    rules = [lines_of(n.body) for n in functions if any("rule(" in ast.unparse(d) for d in n.decorator_list)]
    classes = [lines_of(n.body[1:]) + 1 for n in found if isinstance(n, ast.ClassDef)]
    assert statistics.median(rules) <= 6
    assert statistics.median(classes) <= 15
    assert len(classes) > len(fusedstep.optimizers.__all__)


def test_names_are_found_however_they_are_written():
    assert all(fusedstep.by_name(name) is getattr(fusedstep, name) for name in fusedstep.optimizers.__all__)
    assert fusedstep.by_name("schedule_free_adamw") is fusedstep.ScheduleFreeAdamW
    with pytest.raises(ValueError, match="there is no optimizer 'soap'; there are ADOPT"):
        fusedstep.by_name("soap")
    with pytest.raises(TypeError, match=r"Lion got .* 'momentum'; It takes lr, betas"):
        fusedstep.by_name("lion", momentum=0.9)


def test_options_may_be_strings():
    options = {"lr": "3e-4", "betas": "(0.8, 0.9)", "weight_decay": "0.1", "state_dtype": "bfloat16"}
    make = fusedstep.by_name("lion", **options, maximize="true", max_grad_norm="none")
    optimizer = make([torch.nn.Parameter(torch.ones(2))])
    (group,) = optimizer.param_groups
    found = [group[name] for name in ("lr", "betas", "weight_decay", "maximize")]
    assert found == [3e-4, (0.8, 0.9), 0.1, True]
    assert optimizer.state_dtype is torch.bfloat16


def test_llm_foundry_finds_every_class():
    tomllib = pytest.importorskip("tomllib")
    text = (FOLDER.parents[1] / "pyproject.toml").read_text()
    found = tomllib.loads(text)["project"]["entry-points"]["llmfoundry_optimizers"]
    expected = {f"fused_{name.lower()}": f"fusedstep:{name}" for name in fusedstep.optimizers.__all__}
    assert found == expected


@pytest.mark.parametrize("name", ["ScheduleFreeAdamW", "ScheduleFreeSGD"])
def test_schedule_free_parameters_come_back_and_steps_need_them(name):
    params = [*start(torch.float32), torch.nn.Parameter(torch.ones(2))]
    optimizer = getattr(fusedstep, name)(params, lr=0.1)
    for _ in run(optimizer, params[:3], 3):
        pass
    before = [p.detach().clone() for p in params]
    optimizer.eval()
    optimizer.eval()
    assert not torch.equal(params[0].detach(), before[0])
    with pytest.raises(RuntimeError, match=r"call optimizer\.train\(\) before training"):
        optimizer.step()
    saved = optimizer.state_dict()
    optimizer.train()
    for p, q in zip(params, before, strict=True):
        torch.testing.assert_close(p.detach(), q)
    # one that had no gradient has no state, and stays
    assert len(optimizer.state) == 3
    other = getattr(fusedstep, name)([p.detach().clone().requires_grad_() for p in params], lr=0.1)
    other.load_state_dict(saved)
    assert not other.param_groups[0]["train_mode"]
    with pytest.raises(ValueError, match="no 8 bits for z"):
        getattr(fusedstep, name)(params, state_dtype="int8")


@pytest.mark.parametrize("name", ["lambd", "alpha"])
def test_asgd_refuses_what_newer_torch_refuses(name):
    with pytest.raises(ValueError, match=f"Invalid {name} value: -0.5"):
        fusedstep.ASGD([torch.nn.Parameter(torch.ones(2))], **{name: -0.5})


@pytest.mark.parametrize("beta1", [0.0, 0.9])
def test_ademamix_warms_up_from_any_momentum(beta1):
    assert fusedstep.check_rule(fusedstep.AdEMAMix, 5, "cpu", betas=(beta1, 0.9, 0.99), t_alpha_beta3=4)


def test_a_group_that_comes_later_shares_what_prodigy_has_found():
    first, second = (torch.nn.Parameter(torch.full((3,), 5.0)) for _ in range(2))
    optimizer = fusedstep.Prodigy([first])
    for step in range(60):
        if step == 30:
            optimizer.add_param_group({"params": [second]})
        for p in (first, second):
            p.grad = p.detach().clone()
        optimizer.step()
    ours = [float(group["d"]) for group in optimizer.param_groups]
    assert ours[0] > 1e-2
    assert ours[1] == pytest.approx(ours[0])


@pytest.mark.parametrize("cls", [fusedstep.Prodigy, fusedstep.ScheduleFreeAdamW, fusedstep.ScheduleFreeSGD])
@pytest.mark.parametrize("interrupted", ["loaded", "planned anew"])
def test_what_a_group_keeps_goes_on_while_it_is_frozen(cls, interrupted):
    def ends(interrupt):
        params = [torch.nn.Parameter(torch.tensor([5.0, -1.0])) for _ in range(2)]
        made = lambda: cls([{"params": [p]} for p in params])
        optimizer = made()
        for step in range(12):
            params[1].requires_grad_(not 4 <= step < 8)
            for p in params:
                p.grad = p.detach().clone() if p.requires_grad else None
            if step == 6 and interrupt == "loaded":
                saved = copy.deepcopy(optimizer.state_dict())
                optimizer = made()
                optimizer.load_state_dict(saved)
            elif step == 6 and interrupt:
                optimizer.collect_statistics = True
            optimizer.step()
        return params, [float(group["k"]) for group in optimizer.param_groups]

    (theirs, _), (ours, counts) = ends(None), ends(interrupted)
    assert counts == [12, 12]
    assert all(map(torch.equal, ours, theirs))


def test_corrected_decay_remembers_the_rate_that_a_tensor_had():
    found = []
    for lr in (0.1, torch.tensor(0.1)):
        p = torch.nn.Parameter(torch.ones(1))
        optimizer = fusedstep.AdamW([p], lr=lr, weight_decay=0.5, corrected_decay=True)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.1)
        p.grad = torch.zeros(1)
        optimizer.step()
        scheduler.step()
        found.append(float(p.detach()))
    assert found[0] == pytest.approx(found[1])
    assert found[0] == pytest.approx(1 - 0.01**2 / 0.1 * 0.5)
    with pytest.raises(ValueError, match="is for decoupled weight decay; use AdamW"):
        fusedstep.Adam([p], corrected_decay=True)
    with pytest.raises(ValueError, match="Invalid peak_lr: 0"):
        fusedstep.AdamW([p], lr=0.0, corrected_decay=True)


def test_sums_over_all_do_not_depend_on_how_each_tensor_is_stored(engine):
    @rule(states={"m": "m"})
    def own(p, g, m, *, lr):
        a, c = total_over_all(g * g), total_over_all(p * p)
        b = total_over_all(abs(g) * c)
        return p - lr * g / b, m + a * g

    class Own(fusedstep.Optimizer):
        rule = own
        lr: float = 1e6

    def stepped(**options):
        torch.manual_seed(0)
        params = [torch.nn.Parameter(torch.randn(shape)) for shape in ((64, 64), (8,))]
        for p in params:
            p.grad = torch.randn_like(p)
        optimizer = Own(params, engine=engine, **options)
        optimizer.step()
        return params, optimizer.state[params[1]]["m"]

    (plain, m), (mixed, n) = stepped(), stepped(state_dtype="int8")
    torch.testing.assert_close(n, m)
    for p, q in zip(plain, mixed, strict=True):
        torch.testing.assert_close(p, q)


def test_a_check_that_checks_nothing_is_no_success():
    with pytest.raises(ValueError, match="Invalid engine: 'trition'"):
        fusedstep.check_rule(fusedstep.SGD, engine="trition")
    with pytest.raises(ValueError, match=r"\['max_grad_norm'\] change what a step does around its rule"):
        fusedstep.check_rule(fusedstep.SGD, max_grad_norm=1.0)


def test_arguments_of_a_subclass_for_all_groups_are_copied():
    class Own(fusedstep.Lion):
        x: int = for_all(default=3, kw_only=True)

    optimizer = Own([torch.nn.Parameter(torch.ones(1))], x=5)
    assert copy.deepcopy(optimizer).x == optimizer.x == 5


def stepped(cls, **options):
    p = torch.nn.Parameter(torch.randn(4))
    optimizer = cls([p], **options)
    p.grad = torch.randn(4)
    optimizer.step()
    return p, optimizer


def test_a_tensor_that_lost_what_it_keeps_is_refused_and_nothing_written():
    _, optimizer = stepped(fusedstep.NAdam)
    saved = optimizer.state_dict()
    del saved["state"][0]["mu_product"]
    p, other = stepped(fusedstep.NAdam)
    other.load_state_dict(saved)
    before = p.detach().clone()
    with pytest.raises(RuntimeError, match=r"without \['mu_product'\], which it updates at every step"):
        other.step()
    assert torch.equal(p, before)


def test_a_group_of_a_checkpoint_has_all_that_it_keeps_or_nothing():
    _, optimizer = stepped(fusedstep.Prodigy)
    saved = optimizer.state_dict()
    del saved["param_groups"][0]["d"]
    _, other = stepped(fusedstep.Prodigy)
    with pytest.raises(ValueError, match="the checkpoint has no d for a group of Prodigy"):
        other.load_state_dict(saved)


@pytest.mark.parametrize("wrong", ["1", torch.ones(2), None])
def test_what_a_group_keeps_is_a_number(wrong):
    p, optimizer = stepped(fusedstep.Prodigy)
    optimizer.param_groups[0]["d"] = wrong
    before = p.detach().clone()
    with pytest.raises(TypeError, match="use a number or a one-element tensor"):
        optimizer.step()
    assert torch.equal(p, before)
