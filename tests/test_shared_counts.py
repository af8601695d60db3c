"""Processes that share an optimizer's state, as those of A3C do, share its counts."""

import pytest
import torch

import fusedstep

STATES = ("exp_avg", "exp_avg_sq")


class SharedAdam(fusedstep.Adam):
    """As A3C's: states that are made, and shared, before there are other processes."""

    def __init__(self, params, shape=(1,), **options):
        super().__init__(params, **options)
        for p in self.param_groups[0]["params"]:
            self.state[p]["step"] = torch.zeros(shape)
            for name in STATES:
                self.state[p][name] = torch.zeros_like(p.data)

    def share_memory(self):
        for values in self.state.values():
            for t in values.values():
                t.share_memory_()


def train(params, optimizer, steps):
    torch.set_num_threads(1)
    for _ in range(steps):
        for p in params:
            p.grad = torch.ones_like(p)
        optimizer.step()


def elsewhere(start, *args):
    process = torch.multiprocessing.get_context(start).Process(target=train, args=args)
    process.start()
    process.join()
    assert process.exitcode == 0


def parameters():
    params = [torch.nn.Parameter(torch.arange(n + 1.0)) for n in range(3)]
    for p in params:
        p.share_memory_()
    return params


def expected(steps):
    params = parameters()
    optimizer = fusedstep.Adam(params, lr=0.1)
    train(params, optimizer, steps)
    return params, optimizer


def check(params, optimizer, steps):
    same, alone = expected(steps)
    for p, q in zip(params, same, strict=True):
        torch.testing.assert_close(p, q)
        assert optimizer.state[p]["step"].item() == steps
        assert optimizer.state[p]["step"].is_shared()
        for name in STATES:
            torch.testing.assert_close(optimizer.state[p][name], alone.state[q][name])


@pytest.mark.parametrize("start", ["fork", "spawn"])
@pytest.mark.parametrize("shape", [(), (1,)], ids=str)
def test_processes_count_together(start, shape):
    params = parameters()
    optimizer = SharedAdam(params, shape, lr=0.1)
    optimizer.share_memory()
    counts = [optimizer.state[p]["step"] for p in params]
    elsewhere(start, params, optimizer, 2)
    # the very tensors, for whoever holds them
    assert [count.item() for count in counts] == [2] * 3
    train(params, optimizer, 1)
    elsewhere(start, params, optimizer, 1)
    train(params, optimizer, 1)
    assert [count.item() for count in counts] == [5] * 3
    check(params, optimizer, 5)


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_counts_that_are_shared_after_some_steps_are_counted_on_together(start):
    params = parameters()
    optimizer = SharedAdam(params, lr=0.1)
    train(params, optimizer, 2)
    optimizer.share_memory()
    elsewhere(start, params, optimizer, 2)
    train(params, optimizer, 1)
    check(params, optimizer, 5)


def test_every_engine_counts_in_shared_memory(engine):
    params = parameters()
    optimizer = SharedAdam(params, engine=engine, lr=0.1)
    optimizer.share_memory()
    counts = [optimizer.state[p]["step"] for p in params]
    train(params, optimizer, 2)
    plan = optimizer._plan
    # as another process would
    for count in counts:
        count.fill_(7)
    train(params, optimizer, 1)
    assert [count.item() for count in counts] == [8] * 3
    assert all(optimizer.state[p]["step"] is count for p, count in zip(params, counts, strict=True))
    assert optimizer._plan is plan
    # one that is skipped counts nothing
    optimizer.skip_nonfinite = True
    params[0].grad.fill_(float("nan"))
    optimizer.step()
    assert [count.item() for count in counts] == [8] * 3


def test_a_loaded_count_is_no_longer_that_of_the_one_it_came_from():
    params = parameters()
    optimizer = SharedAdam(params, lr=0.1)
    optimizer.share_memory()
    train(params, optimizer, 2)
    other = fusedstep.Adam(params, lr=0.1)
    other.load_state_dict(optimizer.state_dict())
    train(params, other, 1)
    assert optimizer.state[params[0]]["step"].item() == 2
    assert other.state[params[0]]["step"].item() == 3
