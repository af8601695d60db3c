"""Steps of a rule on an engine, beside the same rule called with plain float64 numbers."""

import numpy as np
import torch

from fusedstep.checking import Plain

SHAPES, STEPS = ((), (5,), (3, 7)), 3


def compare(cls, engine, device="cpu"):
    """Parameters, states and what is kept once agree after a few steps with random gradients."""
    random = torch.Generator().manual_seed(0)
    draw = lambda: [torch.randn(shape, generator=random, dtype=torch.float64) for shape in SHAPES]
    params = [torch.nn.Parameter(t.to(device)) for t in draw()]
    optimizer = cls(params, engine=engine)
    group = optimizer.param_groups[0]
    update = optimizer.rules[0]
    options = {name: group[name] for name in update.options if name not in update.group_scalars}
    plain = Plain(update, params)
    for _ in range(STEPS):
        grads = draw()
        for p, g in zip(params, grads, strict=True):
            p.grad = g.to(device)
        plain.step(grads, options)
        optimizer.step()
    flat = lambda tensors: np.concatenate([t.detach().cpu().double().reshape(-1).numpy() for t in tensors])
    close = lambda found, expected: np.testing.assert_allclose(found, expected, rtol=1e-7, atol=1e-7)
    close(flat(params), plain.p)
    kept = iter(plain.kept)
    for _, name in update.states:
        close(flat([optimizer.state[p][name] for p in params]), next(kept))
    for name in update.scalars:
        # float32
        found = flat([optimizer.state[p][name].expand(p.shape) for p in params])
        np.testing.assert_allclose(found, next(kept), rtol=1e-5, atol=1e-6)
    for name in update.group_scalars:
        close(float(group[name]), next(kept)[0])
