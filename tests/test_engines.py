"""How engines are chosen, what happens where one cannot run, and the cpu engine's threads and cache."""

import os
import subprocess
import sys
import textwrap
import threading

import pytest
import torch

import fusedstep
from fusedstep import _engines as engines
from tests.conftest import HAS_GPU, HAS_TRITON


def stepped(**options):
    p = torch.nn.Parameter(torch.ones(100_000))
    p.grad = torch.full_like(p, 0.5)
    optimizer = fusedstep.AdamW([p], **options)
    optimizer.step()
    return p, optimizer


def engine_of(optimizer):
    return optimizer._plan.tables[0].engine.NAME


def test_cpu_parameters_go_to_the_cpu_engine():
    assert engine_of(stepped()[1]) == "cpu"


def test_an_engine_that_was_asked_for_is_used(engine):
    assert engine_of(stepped(engine=engine)[1]) == engine


@pytest.mark.skipif(HAS_GPU, reason="parameters on meta suffice where there is no GPU")
def test_an_engine_that_cannot_serve_says_why():
    p = torch.nn.Parameter(torch.ones(3, device="meta"))
    p.grad = torch.ones(3, device="meta")
    with pytest.raises(RuntimeError, match=r"engine='cpu' cannot step a parameter on meta.*engine='torch'"):
        fusedstep.AdamW([p], engine="cpu").step()
    fusedstep.AdamW([p]).step()


@pytest.mark.skipif(not HAS_TRITON, reason="there is no Triton for this platform")
def test_triton_without_interpreter_refuses_cpu_tensors():
    code = """
        import torch, fusedstep
        p = torch.nn.Parameter(torch.ones(3)); p.grad = torch.ones(3)
        try:
            fusedstep.AdamW([p], engine="triton").step()
        except RuntimeError as error:
            assert "TRITON_INTERPRET=1" in str(error), error
        else:
            raise SystemExit("no error")
    """
    run(code, TRITON_INTERPRET="0")


def test_where_an_engine_is_missing_torch_steps_in_with_one_warning(monkeypatch):
    engines.load.cache_clear()
    engines._warn_once.cache_clear()
    real = engines.importlib.import_module

    def missing(name):
        if name.endswith(".cpu"):
            raise ImportError("No module named 'llvmlite'")
        return real(name)

    monkeypatch.setattr(engines.importlib, "import_module", missing)
    with pytest.warns(UserWarning, match="falls back to plain tensor operations on cpu.*llvmlite") as caught:
        used = [engine_of(stepped()[1]) for _ in range(2)]
    assert used == ["torch", "torch"]
    assert len([w for w in caught if "falls back" in str(w.message)]) == 1
    with pytest.raises(RuntimeError, match="llvmlite"):
        stepped(engine="cpu")
    monkeypatch.undo()
    engines.load.cache_clear()


def run(code, **environment):
    """Run Python code in a process of its own."""
    env = {**os.environ, **environment}
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], env=env, capture_output=True, text=True, timeout=600
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout


STEP = """
    import os, torch, fusedstep
    torch.set_num_threads(2)
    def train():
        p = torch.nn.Parameter(torch.ones(2_000_000)); p.grad = torch.full_like(p, 0.5)
        optimizer = fusedstep.AdamW([p], engine="cpu"); optimizer.step(); optimizer.step()
        return float(p.double().sum())
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_the_cpu_engine_works_after_a_fork():
    # the parent's threads do not exist in the child: torch's own operations would wait for them there,
    # so a DataLoader's worker sets the number of threads to one; we do not depend on that
    code = (
        STEP
        + """
    p = torch.nn.Parameter(torch.ones(2_000_000)); p.grad = torch.full_like(p, 0.5)
    optimizer = fusedstep.AdamW([p], engine="cpu"); optimizer.step()
    pid = os.fork()
    optimizer.step()
    total = p.detach().numpy().astype("float64").sum()
    if pid == 0:
        os._exit(int(2_000_000 * (1 - total / 2_000_000) * 1000 % 251))
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == int(2_000_000 * (1 - total / 2_000_000) * 1000 % 251)
    """
    )
    run(code)


def test_optimizers_step_in_many_threads_at_once():
    expected = stepped(engine="cpu")[0]
    results = []
    threads = [threading.Thread(target=lambda: results.append(stepped(engine="cpu")[0])) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 8
    assert all(torch.equal(p, expected) for p in results)


def test_without_openmp_python_threads_do_the_work(monkeypatch):
    from fusedstep._engines.cpu import engine as cpu

    monkeypatch.setattr(cpu, "_openmp", lambda: None)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    p = torch.nn.Parameter(torch.ones(2_000_000))
    q = torch.nn.Parameter(p.detach().clone())
    p.grad, q.grad = (torch.full_like(p, 0.5) for _ in range(2))
    fusedstep.AdamW([p], engine="cpu").step()
    monkeypatch.undo()
    fusedstep.AdamW([q], engine="cpu").step()
    assert torch.equal(p, q)


def test_importing_fusedstep_imports_neither_numba_nor_triton():
    run("import sys, fusedstep; assert not {'numba', 'triton', 'llvmlite'} & set(sys.modules)")
