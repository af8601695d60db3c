"""offload="cpu": a parameter comes to the host again only if somebody has written to it since it went up.

Without a GPU, streams are played and fingerprints are taken in Triton's interpreter.
"""

import copy

import pytest
import torch
from torch import nn

import fusedstep
from fusedstep._algorithm.step import PARAM
from fusedstep._engines import load
from fusedstep._memory import offload, sent
from fusedstep._memory.row import Row
from tests.conftest import HAS_TRITON
from tests.test_offload import ADAMW, SMALL, Twin, stream_on_cpu

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="fingerprints are taken by Triton")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request, monkeypatch):
    if request.param == "cpu":
        stream_on_cpu(monkeypatch, [])
    monkeypatch.setattr(offload, "BUCKET_BYTES", 4096)
    return request.param


@pytest.fixture
def brought(monkeypatch):
    """The identities of parameters that have come to the host."""
    found, copy_in = [], Row.copy_in

    def noted(row, plane, waits=True):
        if plane == PARAM:
            found.append(id(row.param))
        copy_in(row, plane, waits)

    monkeypatch.setattr(Row, "copy_in", noted)
    return found


@pytest.mark.parametrize("numel", [1, 2, 1023, 5000, 300_000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_any_bit_changes_a_fingerprint(device, numel, dtype):
    if numel * dtype.itemsize % 4:
        numel += 1
    engine, _ = load("triton", device)
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    first = torch.randn(numel, device=device).to(dtype)
    others = [first.clone() for _ in range(4)]
    for t, i in zip(others[1:3], (0, numel - 1), strict=True):
        t.view(bits)[i] ^= 1 << (8 * dtype.itemsize - 2)
    # two words in each other's place
    others[3][:2] = first[:2].flip(0)
    found = engine.fingerprints([first, *others]).tolist()
    assert found[0] == found[1]
    assert len({*found}) == (4 if numel > 1 else 3) - (numel == 1)


def test_a_fingerprint_knows_signed_zeros_and_has_nothing_to_say_of_nothing(device):
    engine, _ = load("triton", device)
    zeros = torch.zeros(8, device=device)
    found = engine.fingerprints([zeros, -zeros, zeros[:0], torch.full((8,), torch.nan, device=device)])
    assert len({*found.tolist()}) == 4
    assert found[2] == 0


def test_what_nobody_has_written_to_comes_down_once(device, brought):
    twin = Twin(device, *ADAMW)
    for _ in range(4):
        twin.step()
    # what is not made of whole words would, but for float32 there is none
    assert sorted(brought) == sorted(map(id, twin.there))
    twin.assert_same()


WRITES = {
    "in place": lambda p: p.data.mul_(1.5),
    "one element": lambda p: p.data.view(-1)[-1:].add_(1e-3),
    "another tensor": lambda p: setattr(p, "data", p.data.clone().neg_()),
    "swapped halves": lambda p: p.data.copy_(p.data.roll(1)),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_what_was_written_to_comes_down_again(device, brought, write):
    twin = Twin(device, *ADAMW)
    chosen = [4, 5]
    for i in range(6):
        # twice in a row, then not, then again: it is brought after the others, then with them
        if i in (1, 2, 5):
            for k in chosen:
                write(twin.here[k])
                write(twin.there[k])
        brought.clear()
        twin.step()
        written = {id(twin.there[k]) for k in chosen}
        if i in (1, 2, 5):
            assert {*brought} == written
        elif i == 3:
            # brought without waiting for the answer
            assert {*brought} == written
        elif i == 4:
            assert not brought
    twin.assert_same()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("options", [{}, {"max_grad_norm": 0.1}], ids=str)
def test_sixteen_bits_of_odd_sizes_always_come_down(device, brought, dtype, options):
    twin = Twin(device, fusedstep.AdamW, options, [torch.randn(7), torch.randn(8)], dtype)
    # one that begins between two words
    start = torch.randn(9).to(dtype)
    twin.here.append(nn.Parameter(start[1:].clone()))
    twin.there.append(nn.Parameter(start.to(device)[1:]))
    twin.plain.add_param_group({"params": twin.here[2:]})
    twin.away.add_param_group({"params": twin.there[2:]})
    for _ in range(3):
        brought.clear()
        twin.step()
    assert sorted(brought) == sorted(map(id, (twin.there[0], twin.there[2])))
    twin.assert_same()


@pytest.mark.parametrize(
    "options", [SMALL, {"master": "split"}, {"master": "float32", "max_grad_norm": 0.1}], ids=str
)
def test_masters_notice_what_was_written(device, options):
    twin = Twin(device, fusedstep.AdamW, options, dtype=torch.bfloat16)
    for i in range(5):
        if i in (2, 3):
            twin.here[5].data.mul_(1.25)
            twin.there[5].data.mul_(1.25)
        twin.step()
    twin.assert_same()


def test_gradients_that_come_and_go_bring_parameters_down(device):
    twin = Twin(device, *ADAMW)
    for i in range(6):
        twin.here[5].data.add_(1)
        twin.there[5].data.add_(1)
        twin.step(skip=[(), (1,), (1,), (0, 5), (), ()][i])
    twin.assert_same()


def test_a_step_that_failed_leaves_nothing_to_compare_with(device, monkeypatch):
    twin = Twin(device, *ADAMW)
    twin.step()
    twin.give_gradients()
    with monkeypatch.context() as patch:
        patch.setattr(sent.Sent, "changed", lambda self: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            twin.away.step()
    for p, q in twin.both():
        p.data.copy_(q.data)
    twin.plain.load_state_dict(copy.deepcopy(twin.away.state_dict()))
    for _ in range(3):
        twin.step()
    twin.assert_same()


def test_a_default_device_changes_nothing(device):
    twin = Twin(device, *ADAMW)
    for _ in range(4):
        twin.give_gradients()
        with torch.device("meta"):
            twin.plain.step()
            twin.away.step()
    twin.assert_same()


def test_without_triton_all_parameters_come_down(device, brought, monkeypatch):
    monkeypatch.setattr(sent, "load", lambda name, device_type: (None, "it is not there"))
    twin = Twin(device, *ADAMW)
    for _ in range(3):
        twin.step()
    assert sorted(brought) == sorted(3 * [*map(id, twin.there)])
    twin.assert_same()
