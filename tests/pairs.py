"""Optimizers side by side, on equal parameters and gradients."""

import torch


def copies(tensors):
    """Parameters that begin as these."""
    return [torch.nn.Parameter(t.detach().clone()) for t in tensors]


def set_grads(params, grads):
    for p, g in zip(params, grads, strict=True):
        p.grad = None if g is None else g.clone()


def same_bits(a, b):
    """Whether they are equal, NaN by NaN and signs of zeros too."""
    words = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.dtype.itemsize]
    return a.dtype == b.dtype and torch.equal(a.contiguous().view(words), b.contiguous().view(words))


def whole(t):
    """All of a distributed tensor, or the tensor itself."""
    return t.full_tensor().detach() if hasattr(t, "full_tensor") else t.detach()


class Pair:
    """Ours and torch's on equal parameters; `step` feeds both the same gradients and compares."""

    def __init__(self, case, engine, shapes=((4, 3), (5,), (600,))):
        self.case = case
        self.ours = [torch.nn.Parameter(torch.randn(shape)) for shape in shapes]
        self.theirs = copies(self.ours)
        self.a = case.ours(self.ours, engine=engine, **case.options)
        self.b = case.theirs(self.theirs, **case.options)

    def both(self):
        return zip(self.ours, self.theirs, strict=True)

    def set_grads(self, skip=()):
        for i, (p, q) in enumerate(self.both()):
            p.grad = None if i in skip else torch.randn_like(p)
            q.grad = None if i in skip else p.grad.clone()

    def step(self, skip=()):
        self.set_grads(skip)
        self.a.step()
        self.b.step()
        self.compare()

    def compare(self):
        for p, q in self.both():
            torch.testing.assert_close(p.detach(), q.detach(), rtol=1e-5, atol=1e-6)
            for name, value in self.b.state[q].items():
                torch.testing.assert_close(self.a.state[p][name], value, rtol=1e-5, atol=1e-6)
