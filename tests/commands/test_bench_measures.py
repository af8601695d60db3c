"""What `fusedstep bench` counts, and what it does with a result that is wrong."""

import re
import sys

import pytest
import torch
from torch import nn

import fusedstep
from fusedstep.cli import measure, peers, report, timing
from fusedstep.cli.contender import held, ours
from fusedstep.cli.moved import bytes_moved, bytes_per_parameter
from fusedstep.cli.parameters import parameters
from fusedstep.cli.peer import Peer
from fusedstep.cli.shapes import MODELS, with_gradients
from fusedstep.cli.timing import _elements as elements_to_copy
from fusedstep.cli.works import GPU, Work

from .bench_runs import ON_CPU, a_tiny_model, quick, result_of, rows_of, run  # noqa: F401


@pytest.mark.parametrize(
    ("optimizer", "options", "dtype", "count"),
    [
        ("SGD", {}, "fp32", 12),
        ("SGD", {"momentum": 0.9}, "fp32", 20),
        ("AdamW", {}, "fp32", 28),
        ("AdamW", {"sharded": True}, "fp32", 28),
        ("AdamW", {}, "bf16", 14),
        ("AdamW", {}, "bf16/fp32", 22),
        ("AdamW", {"statistics": True}, "fp32", 28),
        ("AdamW", {"max_grad_norm": 1.0, "skip_nonfinite": True}, "fp32", 32),
        ("AdamW", {"ema_decay": 0.9}, "bf16", 22),
        ("AdamW", {"grad_scale": 1.0}, "fp32", 32),
        ("AdamW", {"grad_scale": 1.0}, "bf16/fp32", 24),
        ("Lamb", {"grad_scale": 1.0, "max_grad_norm": None}, "fp32", 44),
        ("Lamb", {"grad_scale": 1.0}, "bf16", 26),
        ("Lamb", {"max_grad_norm": None}, "fp32", 40),
        ("Lamb", {}, "fp32", 44),
        ("Lamb", {}, "bf16", 24),
        ("BertAdam", {}, "fp32", 32),
        ("functional.adamw_", {}, "fp32", 28),
        # no workspace
        ("Muon", {}, "fp32", 20),
    ],
)
def test_bytes_that_must_move(optimizer, options, dtype, count):
    assert bytes_per_parameter(Work("", optimizer, options, dtype)) == count


def test_models_have_the_size_that_they_are_known_by():
    size = {name: sum(map(torch.Size.numel, map(torch.Size, shapes))) for name, shapes in MODELS.items()}
    assert size["bert-large"] == pytest.approx(335e6, rel=0.01)
    assert size["llama-1b"] == pytest.approx(1.236e9, rel=0.001)
    assert size["llama-8b/8"] == pytest.approx(8.030e9 / 8, rel=0.001)
    assert size["resnet-50"] == pytest.approx(25.56e6, rel=0.001)
    assert size["vit-l"] == pytest.approx(304.3e6, rel=0.001)


def test_gradients_of_experts_come_and_go(monkeypatch):
    work = Work("moe", "AdamW", {}, "fp32")
    small = [tuple(min(n, 8) for n in shape) for shape in MODELS["moe"]]
    monkeypatch.setitem(MODELS, "moe", small)
    params = parameters(work, "cpu")
    step, seen = ours(work, params).step, []
    for _ in range(3):
        step()
        seen.append([p.grad is not None for p in params])
    assert seen[0] != seen[1] != seen[2]
    chosen = with_gradients("moe")
    assert seen == [next(chosen) for _ in seen]
    # four of sixteen
    assert 0.25 < bytes_moved(work, params) / sum(28 * p.numel() for p in params) < 0.5
    found = measure.measure(work, ON_CPU)
    assert found["peers"]["torch fused"]["device"] > 0


@pytest.mark.parametrize("options", [{"grad_scale": 1.0}, {"max_grad_norm": 1.0, "scaler": True}], ids=str)
def test_a_step_with_a_scaler_is_timed_beside_torchs(options, tiny):
    work = Work(tiny, "AdamW", options, "fp32")
    assert measure.measure(work, ON_CPU)["peers"]["torch fused"]["host"] > 0
    assert work._replace(model="bert-large") in GPU


def test_ours_is_its_own_peer_without_what_goes_along(tiny):
    work = Work(tiny, "AdamW", {"statistics": True}, "fp32", ("fusedstep.AdamW",))
    assert [*measure.measure(work, ON_CPU)["peers"]] == ["fusedstep.AdamW"]
    function = Work(tiny, "functional.adamw_", {}, "fp32", ("fusedstep.AdamW",))
    assert [*measure.measure(function, ON_CPU)["peers"]] == ["fusedstep.AdamW"]


def test_memory_is_that_of_all_tensors_that_are_kept():
    p = nn.Parameter(torch.ones(100, 100))
    p.grad = torch.ones_like(p)
    optimizer = torch.optim.SGD([p], momentum=0.9)
    optimizer.step()
    assert held(optimizer) == 4 * 100 * 100
    # a view of the same is not counted again
    optimizer.state[p]["again"] = [optimizer.state[p]["momentum_buffer"][3:]]
    assert held(optimizer) == 4 * 100 * 100


def test_steps_that_take_long_are_timed_less_often(monkeypatch):
    clock, calls = [0.0], {"slow": 0, "fast": 0}
    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock[0])

    def step(name, seconds):
        calls[name] += 1
        clock[0] += seconds

    slow, fast = timing.on_cpu([lambda: step("slow", 1.0), lambda: step("fast", 0.0016)], 20)
    assert calls == {"slow": 4, "fast": 20}
    assert slow.device == pytest.approx((1000.0, 1000.0, 1000.0, 4))
    assert fast.wall == pytest.approx((1.6, 1.6, 1.6, 20))


class Copied(timing.Copy):
    """A copy that takes forty milliseconds by the clock of a test."""

    bytes = 4000

    def __init__(self, step):
        self.step = step

    def __call__(self):
        self.step("copy", 0.04)


def test_a_copy_takes_turns_and_short_steps_then_find_their_tensors_in_the_caches_again(monkeypatch):
    clock, order = [0.0], []
    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock[0])

    def step(name, seconds):
        order.append(name)
        clock[0] += seconds

    steps = [lambda: step("long", 0.1), lambda: step("short", 0.001), Copied(step)]
    *_, short, copy = timing.on_cpu(steps, 3)
    assert order == [*["long", "short", "copy", "short"] * 2, "long", "short", "copy"]
    assert (short.device.samples, copy.device.samples) == (3, 3)
    assert copy.device.median == pytest.approx(40.0)


def test_the_limit_has_the_speed_that_memory_has_while_the_row_is_timed(tiny):
    copies = iter([0.0, 0.0, 0.005, 0.01, 0.02])
    step = lambda name, seconds: timing.time.sleep(next(copies))
    work = Work(tiny, "AdamW", {}, "fp32")
    found = measure.measure(work, ON_CPU._replace(rounds=5, copy=Copied(step)))
    assert found["copy"]["samples"] == 5
    assert 5 <= found["copy"]["device"] < 10
    assert found["limit"] == found["bytes"] * found["copy"]["device"] / 4000
    assert [*found["peers"]] == ["torch fused"]


def test_a_copy_reads_and_writes_all_it_has():
    assert timing.Copy("cpu", 10).bytes == 80


@pytest.mark.parametrize(("free", "elements"), [(1 << 20, 1 << 20), (1 << 34, 1 << 27), (1 << 40, 1 << 28)])
def test_a_copy_on_a_gpu_takes_at_most_a_sixteenth_of_what_is_free_or_little(free, elements, monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free, free))
    assert elements_to_copy("cuda") == elements


class Mark:
    """An event of a GPU, by the clock of a test."""

    clock = 0.0

    def __init__(self, enable_timing):
        self.at = None

    def record(self):
        self.at = Mark.clock

    def elapsed_time(self, end):
        return 1e3 * (end.at - self.at)


def test_on_a_gpu_all_take_turns_and_the_queue_is_filled_first(monkeypatch):
    monkeypatch.setattr(Mark, "clock", 0.0)
    monkeypatch.setattr(timing.time, "perf_counter", lambda: Mark.clock)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "Event", Mark)
    slept, order = [], []
    monkeypatch.setattr(torch.cuda, "_sleep", slept.append, raising=False)

    def step(name, seconds):
        order.append(name)
        Mark.clock += seconds

    steps = [
        lambda: step("fast", 0.0016),
        timing.Prepared(lambda: step("before", 0.5), lambda: step("slow", 0.5)),
    ]
    fast, slow = timing.on_gpu(steps, 20)
    # six turns of ten; a step that takes long is taken alone
    assert fast.host == pytest.approx((1.6, 1.6, 1.6, 60))
    # three fill the queue
    assert fast.device == pytest.approx((1.6, 1.6, 1.6, 18))
    assert slow.host == pytest.approx((500.0, 500.0, 500.0, 6))
    assert slow.wall == pytest.approx((1000.0, 1000.0, 1000.0, 6))
    assert len(slept) == 12
    assert [*dict.fromkeys(order[-200:])] == ["fast", "before", "slow"]
    assert fast.raw()["quartiles"]["wall"] == pytest.approx([1.6, 1.6])


# what is wrong


def off(self, *args, real=fusedstep.AdamW.step, **kwargs):
    real(self, *args, **kwargs)
    if self.engine is None:
        for p in self.param_groups[0]["params"]:
            p.data += 1e-3


@pytest.mark.parametrize("options", [{}, {"max_grad_norm": 1.0}], ids=str)
def test_a_wrong_result_is_said_and_not_timed(options, tiny, monkeypatch):
    work = Work(tiny, "AdamW", options, "fp32")
    assert "ours" in measure.measure(work, ON_CPU)
    monkeypatch.setattr(fusedstep.AdamW, "step", off)
    found = measure.measure(work, ON_CPU)
    assert found["wrong"].startswith("off by 0.003")
    assert "ours" not in found


def test_a_wrong_row_does_not_end_the_run(monkeypatch, tmp_path):
    monkeypatch.setattr(fusedstep.AdamW, "step", off)
    cases = [Work("400 tiny", name, {}, "fp32") for name in ("AdamW", "Lion")]
    monkeypatch.setattr("fusedstep.cli.asked.CPU", cases)
    done = run("--json", str(tmp_path / "raw.json"))
    assert done.exit_code == 1
    assert "WRONG: off by" in done.output
    wrong, right = rows_of(tmp_path / "raw.json")
    assert "wrong" in wrong
    assert right["ours"]["device"] > 0


def test_a_row_that_fails_is_said(tiny):
    found = measure.measure(Work(tiny, "AdamW", {"betas": (2.0, 0.9)}, "fp32"), ON_CPU)
    assert found["failed"].startswith("ValueError: Invalid beta parameter")
    assert report.trouble_of(found).startswith("FAILED: ValueError")


def test_a_peer_that_disagrees_and_one_that_fails_are_left_out(tiny, monkeypatch):
    class Other(torch.optim.AdamW):
        def __init__(self, params, lr):
            super().__init__(params, lr, weight_decay=0.5)

    class Broken(Other):
        def step(self):
            raise RuntimeError("no such kernel\nand more")

    module = type(sys)("others")
    module.Other, module.Broken = Other, Broken
    monkeypatch.setitem(sys.modules, "others", module)
    extra = [Peer(name, "others", {"AdamW": (name, {})}) for name in ("Other", "Broken")]
    monkeypatch.setattr(peers, "PEERS", extra)
    found = measure.measure(Work(tiny, "AdamW", {}, "fp32"), ON_CPU)
    assert found["peers"] == {}
    wrong, broken = found["left_out"]["Other"], found["left_out"]["Broken"]
    assert re.match(r"disagrees with float64: off by \S+ after 3 steps, \S+ is allowed", wrong)
    assert broken == "RuntimeError: no such kernel"
    # nobody waits for a time that will not come
    shown = report.table(result_of(found))
    assert [*shown.columns[2].cells] == ["fusedstep", "Other", "Broken"]
    assert "left out: disagrees with float64: off by" in [*shown.columns[-1].cells][1]


def test_a_peer_that_was_asked_for_and_lacks_an_option_is_said(tiny):
    work = Work(tiny, "AdamW", {"cautious": True}, "fp32")
    assert "left_out" not in measure.measure(work, ON_CPU)
    found = measure.measure(work, ON_CPU._replace(peers=("fused",)))
    assert found["left_out"] == {"torch fused": "lacks one of these options, or stores states in another way"}
