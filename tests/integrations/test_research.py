"""Ignite, skorch, Opacus and Stable-Baselines3: each takes an optimizer, or its class, and no code of ours."""

import numpy as np
import pytest
import torch
from ignite.engine import Events, create_supervised_trainer
from ignite.handlers import Checkpoint, DiskSaver
from opacus import PrivacyEngine
from skorch import NeuralNetRegressor
from skorch.callbacks import GradientNormClipping
from stable_baselines3 import A2C, PPO

import fusedstep
from tests.integrations import twins

pair = pytest.mark.parametrize(
    ("ours", "theirs", "options"),
    [
        (fusedstep.AdamW, torch.optim.AdamW, {"lr": 0.02, "weight_decay": 0.1}),
        (fusedstep.SGD, torch.optim.SGD, {"lr": 0.02, "momentum": 0.9}),
    ],
    ids=["adamw", "sgd"],
)


def ignite(cls, options, epochs=2, clip=None, resume=None, save=None, **more):
    model = twins.model()
    optimizer = cls(model.parameters(), **options)
    trainer = create_supervised_trainer(model, optimizer, torch.nn.MSELoss(), **more)
    parts = {"model": model, "optimizer": optimizer, "trainer": trainer}
    if save:
        keep = Checkpoint(parts, DiskSaver(save, require_empty=False), n_saved=None)
        trainer.add_event_handler(Events.EPOCH_COMPLETED, keep)
    if resume:
        Checkpoint.load_objects(parts, torch.load(resume, weights_only=True))
    trainer.run(torch.utils.data.DataLoader(twins.dataset(), batch_size=8), max_epochs=epochs)
    return parts


@pair
def test_ignite_trains_as_with_torchs(ours, theirs, options):
    twins.assert_close(ignite(ours, options)["model"], ignite(theirs, options)["model"])


def test_ignite_resumes_bit_by_bit(tmp_path):
    whole = ignite(fusedstep.AdamW, {"lr": 0.02}, save=tmp_path)
    (half,) = tmp_path.glob("checkpoint_4.pt")
    again = ignite(fusedstep.AdamW, {"lr": 0.02}, resume=half)
    twins.assert_equal(whole["model"], again["model"])
    twins.assert_states_equal(whole["optimizer"], again["optimizer"])


def test_what_ignites_scaler_skips_is_skipped():
    # the first gradients are scaled to infinity
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, backoff_factor=2.0**-110)
    parts = ignite(fusedstep.AdamW, {"lr": 0.02}, amp_mode="amp", scaler=scaler)
    assert parts["optimizer"].state[next(parts["model"].parameters())]["step"] == 7
    assert scaler.get_scale() == 2.0**17


def skorch(cls, callbacks=(), **options):
    torch.manual_seed(0)
    net = NeuralNetRegressor(
        twins.model(),
        optimizer=cls,
        max_epochs=2,
        batch_size=8,
        train_split=None,
        verbose=0,
        callbacks=[*callbacks],
        **{f"optimizer__{name}": value for name, value in options.items()},
    )
    return net.initialize()


def fitted(net):
    x, y = twins.data()
    return net.partial_fit(x.numpy(), y.numpy())


@pair
def test_skorch_trains_as_with_torchs(ours, theirs, options):
    a, b = fitted(skorch(ours, **options)), fitted(skorch(theirs, **options))
    twins.assert_close(a.module_, b.module_)
    assert a.history[:, "train_loss"] == pytest.approx(b.history[:, "train_loss"], rel=1e-5)


def test_in_skorch_the_step_clips_as_its_callback_would():
    a = fitted(skorch(fusedstep.SGD, lr=0.05, max_grad_norm=twins.LIMIT))
    b = fitted(skorch(torch.optim.SGD, [GradientNormClipping(twins.LIMIT)], lr=0.05))
    twins.assert_close(a.module_, b.module_)


def test_skorch_saves_loads_and_goes_on_bit_by_bit(tmp_path):
    files = {f"f_{part}": tmp_path / part for part in ("params", "optimizer", "history")}
    net = fitted(skorch(fusedstep.AdamW, lr=0.02))
    net.save_params(**files)
    again = skorch(fusedstep.AdamW, lr=0.02)
    again.load_params(**files)
    for other in (net, again):
        fitted(other)
    twins.assert_equal(net.module_, again.module_)


def test_skorchs_parameters_set_options_of_groups():
    net = skorch(fusedstep.AdamW, lr=0.02, param_groups=[("*.bias", {"weight_decay": 0.0})])
    assert {group["weight_decay"] for group in net.optimizer_.param_groups} == {0.0, 0.01}
    net.set_params(optimizer__lr=0.5)
    assert {group["lr"] for group in net.optimizer_.param_groups} == {0.5}


def private(cls, noise=0.0, **options):
    model = twins.model()
    optimizer = cls(model.parameters(), lr=0.05, **options)
    loader = torch.utils.data.DataLoader(twins.dataset(), batch_size=8)
    model, optimizer, loader = PrivacyEngine().make_private(
        module=model,
        optimizer=optimizer,
        data_loader=loader,
        noise_multiplier=noise,
        max_grad_norm=1.0,
        poisson_sampling=False,
        noise_generator=torch.Generator().manual_seed(5),
    )
    for x, y in loader:
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("noise", [0.0, 0.5])
def test_opacus_clips_every_sample_adds_noise_and_ours_takes_the_step(noise):
    ours, optimizer = private(fusedstep.AdamW, noise)
    theirs, _ = private(torch.optim.AdamW, noise)
    assert type(optimizer.original_optimizer) is fusedstep.AdamW
    twins.assert_close(ours, theirs)


def test_opacus_hands_over_the_gradient_that_it_has_made():
    _, optimizer = private(fusedstep.AdamW, statistics=True)
    params = [p for group in optimizer.param_groups for p in group["params"]]
    norm = torch.stack([p.grad.square().sum() for p in params]).sum().sqrt()
    assert optimizer.original_optimizer.statistics().grad_norm.item() == pytest.approx(norm.item())


def played(algorithm, cls, steps=64, **options):
    agent = algorithm(
        "MlpPolicy",
        "CartPole-v1",
        n_steps=16,
        seed=0,
        device="cpu",
        policy_kwargs={
            "optimizer_class": cls,
            "optimizer_kwargs": options.pop("of_optimizer", {}),
            "net_arch": [8],
        },
        **options,
    )
    return agent.learn(steps)


@pytest.mark.parametrize("algorithm", [A2C, PPO])
def test_stable_baselines_learns_as_with_torchs(algorithm):
    eps = {"of_optimizer": {"eps": 1e-3}}
    ours, theirs = (played(algorithm, cls, **eps) for cls in (fusedstep.Adam, torch.optim.Adam))
    assert type(ours.policy.optimizer) is fusedstep.Adam
    twins.assert_close(ours.policy, theirs.policy, 1e-4)


def test_in_stable_baselines_an_infinite_limit_leaves_clipping_to_the_step():
    ours = played(A2C, fusedstep.SGD, max_grad_norm=np.inf, of_optimizer={"max_grad_norm": 0.5})
    theirs = played(A2C, torch.optim.SGD, max_grad_norm=0.5)
    twins.assert_close(ours.policy, theirs.policy, 1e-4)


def test_a_saved_agent_has_its_optimizer_with_it(tmp_path):
    agent = played(A2C, fusedstep.Adam)
    agent.save(tmp_path / "agent")
    again = A2C.load(tmp_path / "agent", device="cpu")
    twins.assert_equal(agent.policy, again.policy)
    twins.assert_states_equal(agent.policy.optimizer, again.policy.optimizer)
