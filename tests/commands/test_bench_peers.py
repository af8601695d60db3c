"""Whom `fusedstep bench` finds to time ours beside, and how these are made."""

import functools
import inspect
import json
import sys

import pytest
import torch
from torch import nn

import fusedstep
from fusedstep.cli import measure, peers
from fusedstep.cli.contender import of_peer
from fusedstep.cli.page import page
from fusedstep.cli.parameters import parameters
from fusedstep.cli.peer import AS_PARAMETERS, INT8, Peer, Stored
from fusedstep.cli.right import Trial
from fusedstep.cli.works import Work

from .bench_runs import ON_CPU, a_tiny_model, quick, run, words_of  # noqa: F401


def cases_of_peers():
    for peer in peers.PEERS:
        # torch's Muon is two optimizers, and has a test of its own
        for name in (c for c in peer.classes if c != "Muon") if not peer.why_not("cpu") else ():
            yield pytest.param(peer, name, id=f"{peer.name}-{name}")


@pytest.mark.parametrize(("peer", "name"), [*cases_of_peers()])
def test_every_peer_that_is_installed_is_made_from_our_options(peer, name, monkeypatch):
    """That numbers agree shows that every option has arrived: defaults differ."""
    # a compiler takes half a minute
    monkeypatch.setattr(torch, "compile", lambda step: step)
    cls = getattr(fusedstep, name)
    options = {"weight_decay": 0.1} if "weight_decay" in inspect.signature(cls).parameters else {}
    work = Work("400 tiny", name, options, "fp32")
    params = parameters(work, "cpu")
    if INT8 in peer.states:
        assert of_peer(peer, work._replace(options={"state_dtype": "int8"}), params) is not None
    else:
        trial = Trial(work, params)
        made = of_peer(peer, work, params)
        assert made is not None
        assert type(made.holder) is peer.cls(name)
        if peer.name.startswith("torch"):
            assert trial.disagreement(functools.partial(of_peer, peer), 16) == ""


def torch_fused():
    return next(peer for peer in peers.PEERS if peer.name == "torch fused" and "cpu" in peer.devices)


def test_options_are_mapped_by_name_with_our_defaults():
    plain = Stored("float32", None)
    found = torch_fused().arguments("AdamW", {"lr": 0.5, "betas": (0.8, 0.9)}, plain)
    assert found["weight_decay"] == 0.01
    assert found["betas"] == (0.8, 0.9)
    assert found["fused"] is True
    # what it cannot do
    assert torch_fused().arguments("AdamW", {"cautious": True}, plain) is None
    assert torch_fused().arguments("AdamW", {"ema_decay": 0.9}, plain) is None
    # what is done around it
    assert torch_fused().arguments("AdamW", {"max_grad_norm": 1.0, "engine": "cpu"}, plain) is not None


def test_what_a_peer_stores_otherwise_is_noted():
    assert torch_fused().note(Stored("float32", None), "float32") == ""
    assert torch_fused().note(Stored("int8", "split"), "bfloat16") == "bfloat16 states, no master"
    eight = Peer("8-bit", "torch.optim", {"AdamW": ("AdamW", {})}, states=(INT8,))
    assert eight.arguments("AdamW", {}, Stored("float32", None)) is None
    assert eight.arguments("AdamW", {}, Stored("int8", None)) is not None
    both = Peer("both", "torch.optim", {}, states=(AS_PARAMETERS, INT8), masters=("split",))
    assert both.note(Stored("int8", "split"), "bfloat16") == ""


def test_clipping_is_done_before_a_peer_that_cannot(tiny):
    work = Work(tiny, "AdamW", {"max_grad_norm": 1e-3}, "fp32")
    assert measure.measure(work, ON_CPU)["peers"]["torch fused"]["note"] == "with clip_grad_norm_"
    params = parameters(work, "cpu")
    of_peer(torch_fused(), work, params).step()
    assert float(nn.utils.get_total_norm([p.grad for p in params])) == pytest.approx(1e-3, rel=1e-3)


def test_peers_are_listed_with_why_others_were_not_found():
    done = run("--peers")
    assert done.exit_code == 0
    assert "torch fused" in done.output
    assert "for cuda only" in done.output


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--peer", "bogus"), "found 'bogus'; use a part of one of these names: torch fused, torch loop"),
        (("--peer", "fused", "--peer", "bogus"), "found 'bogus'"),
        (("--peer", "apex"), "found 'apex': apex (for cuda only) cannot be timed here"),
        (
            ("--peer", "absent"),
            "found 'absent': absent (not installed) cannot be timed here; see fusedstep bench",
        ),
        (("--peer", "loop"), "found 'loop', which has no AdamW; it has ASGD, Adadelta"),
    ],
)
def test_a_peer_that_cannot_be_timed_is_refused(args, message, tiny, monkeypatch):
    absent = Peer("absent", "package_that_is_absent", {"AdamW": ("AdamW", {})})
    monkeypatch.setattr(peers, "PEERS", [*peers.PEERS, absent])
    done = run("--model", tiny, *args)
    assert done.exit_code == 2
    assert message in words_of(done)


def test_only_peers_that_were_timed_are_listed_in_a_result(tiny, tmp_path):
    done = run("--model", tiny, "--peer", "foreach", "--json", str(tmp_path / "a.json"))
    assert done.exit_code == 0, done.output
    found = json.loads((tmp_path / "a.json").read_text())
    assert found["peers"] == {"torch foreach": torch.__version__}
    told = page({**found, "peers": {"apex": "0.1", **found["peers"]}})
    assert "peer torch foreach" in told
    assert "apex" not in told


def test_torchs_muon_is_timed_with_adamw_for_what_it_leaves(tiny):
    work = Work(tiny, "Muon", {}, "fp32")
    found = measure.measure(work, ON_CPU)
    assert [*found["peers"]] == ["torch loop"]
    assert found["bytes"] == 20 * 15 + 28 * 7
    # momentum of the matrix, moments and steps of the vector
    assert found["peers"]["torch loop"]["memory"] == 4 * 15 + 2 * 4 * 7 + 4
    trial, (peer,) = Trial(work, parameters(work, "cpu")), peers.beside("Muon", "cpu", ())
    other = work._replace(options={"nesterov": False})
    assert trial.disagreement(functools.partial(of_peer, peer), 16) == ""
    assert "off by" in trial.disagreement(lambda work, params: of_peer(peer, other, params), 16)


def test_those_that_take_long_come_only_when_asked(tiny):
    names = lambda *asked: {peer.name for peer in peers.beside("AdamW", "cpu", asked)}
    assert "torch compiled" not in names()
    assert {"torch compiled", "torch foreach"} <= names("all")
    assert "torch compiled" not in names("foreach")
    found = measure.measure(Work(tiny, "AdamW", {}, "fp32"), ON_CPU._replace(peers=("foreach",)))
    assert [*found["peers"]] == ["torch foreach"]


def test_peers_are_imported_from_a_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    for path in ("plain_one/__init__.py", "checkout_of/checkout_of/__init__.py"):
        (tmp_path / path).parent.mkdir(parents=True)
        (tmp_path / path).write_text("class Lion: ...\n")
    missing = Peer("missing", "checkout_of", {"Lion": ("Lion", {})})
    assert missing.why_not("cpu") == "not installed"
    peers.add_path(tmp_path)
    assert missing.why_not("cpu") == ""
    assert Peer("plain", "plain_one", {"Lion": ("Lion", {})}).why_not("cpu") == ""


def test_a_package_that_cannot_import_itself_is_imported_bare(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    (tmp_path / "heavy" / "optim").mkdir(parents=True)
    (tmp_path / "heavy" / "__init__.py").write_text("import nothing_of_this_name\n")
    (tmp_path / "heavy" / "optim" / "__init__.py").write_text("")
    (tmp_path / "heavy" / "optim" / "lion.py").write_text("class Lion: ...\n")
    peer = Peer("heavy", "heavy.optim", {"Lion": ("lion.Lion", {})})
    assert "cannot be imported: No module named 'nothing_of_this_name'" in peer.why_not("cpu")
    bare = Peer("heavy", "heavy.optim", {"Lion": ("lion.Lion", {})}, bare=("heavy", "heavy.optim"))
    assert bare.why_not("cpu") == ""
    for name in [name for name in sys.modules if name.partition(".")[0] == "heavy"]:
        del sys.modules[name]
