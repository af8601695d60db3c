"""The same training twice, with ours and with torch.optim's, and what must come of it."""

import torch

# some gradients of the model below are larger, some are not
LIMIT = 0.5


def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))


def data(rows=32):
    x = torch.randn(rows, 6, generator=torch.Generator().manual_seed(1))
    return x, x.square().sum(1, keepdim=True)


def dataset(rows=32):
    return torch.utils.data.TensorDataset(*data(rows))


def assert_close(first, second, tolerance=1e-5):
    """Trained parameters that differ by rounding, and that have been trained."""
    pairs = [*zip(_parameters(first), _parameters(second), strict=True)]
    assert pairs
    for p, q in pairs:
        torch.testing.assert_close(p, q, rtol=tolerance, atol=tolerance)


def assert_equal(first, second):
    for p, q in zip(_parameters(first), _parameters(second), strict=True):
        assert torch.equal(p, q)


def assert_differ(first, second):
    pairs = zip(_parameters(first), _parameters(second), strict=True)
    assert any(not torch.allclose(p, q, rtol=1e-3, atol=1e-4) for p, q in pairs)


def assert_states_equal(first, second):
    a, b = first.state_dict(), second.state_dict()
    assert a["param_groups"] == b["param_groups"]
    assert a["state"].keys() == b["state"].keys()
    assert a["state"]
    for key, values in a["state"].items():
        assert values.keys() == b["state"][key].keys()
        assert all(torch.equal(value, b["state"][key][name]) for name, value in values.items())


def _parameters(of):
    return [*of.parameters()] if isinstance(of, torch.nn.Module) else [*of]
