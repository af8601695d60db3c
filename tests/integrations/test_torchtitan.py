"""torchtitan's container of optimizers with ours in it, stepped and saved as its trainer does."""

import pytest
import torch
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig, default_adamw
from torchtitan.components.optimizer.lr_scheduler import LRSchedulersContainer
from torchtitan.distributed.utils import clip_grad_norm_

import fusedstep
from fusedstep.integrations.torchtitan import FusedOptimizers, fused
from tests.integrations import twins

ADAMW = {"lr": 0.05, "betas": (0.9, 0.95), "weight_decay": 0.1}


def titan(config):
    """A model, what steps it, and a function that does so."""
    model = twins.model()
    container = config.build(model_parts=[model])
    schedule = LRSchedulersContainer.Config(warmup_steps=2).build(optimizers=container, training_steps=8)
    x, y = twins.data()

    def step():
        container.zero_grad()
        torch.nn.functional.mse_loss(model(x), y).backward()
        clip_grad_norm_([*model.parameters()], twins.LIMIT, foreach=True)
        container.step()
        schedule.step()

    return model, container, schedule, step


def test_torchtitans_container_steps_ours_as_its_own():
    models = []
    for config in (fused("AdamW", **ADAMW), default_adamw(**ADAMW)):
        config.implementation = "for-loop"
        model, container, _, one = titan(config)
        for _ in range(4):
            one()
        models.append(model)
    assert type(container.optimizers[0]) is torch.optim.AdamW
    twins.assert_close(*models)


def test_torchtitan_may_mix_ours_with_its_own_by_pattern():
    config = FusedOptimizers.Config(
        param_groups=[
            ParamGroupConfig(pattern="bias", optimizer_name="fusedstep.Lion", optimizer_kwargs={"lr": 0.01}),
            ParamGroupConfig(pattern="0", optimizer_name="fusedstep.AdamW", optimizer_kwargs=ADAMW),
            ParamGroupConfig(pattern=".*", optimizer_name="AdamW", optimizer_kwargs=ADAMW),
        ],
        implementation="for-loop",
        optimizer_factory_kwargs_by_name={"fusedstep.AdamW": {"statistics": True}},
    )
    _, container, _, one = titan(config)
    one()
    assert [type(o) for o in container.optimizers] == [fusedstep.Lion, fusedstep.AdamW, torch.optim.AdamW]
    assert container.optimizers[1].statistics().grad_norm > 0
    with pytest.raises(NotImplementedError, match="Nosuch"):
        FusedOptimizers._resolve_optimizer_factory("Nosuch")
    with pytest.raises(ValueError, match="there is no optimizer 'Nosuch'"):
        FusedOptimizers._resolve_optimizer_factory("fusedstep.Nosuch")


def test_the_container_finds_its_optimizers_where_we_put_ours():
    """Fails with the first torchtitan that looks elsewhere: the name is private to it."""
    assert "_resolve_optimizer_factory" in vars(OptimizersContainer)


@pytest.mark.parametrize(
    "options", [{}, {"state_dtype": "int8"}, {"ema_decay": 0.9}], ids=["plain", "int8", "ema"]
)
def test_torchtitans_checkpoints_by_name_resume_bit_by_bit(options, tmp_path):
    config = fused("AdamW", **ADAMW, **options)
    model, container, schedule, one = titan(config)
    for i in range(4):
        if i == 2:
            weights = {name: p.clone() for name, p in model.state_dict().items()}
            save({"optimizer": container.state_dict()}, checkpoint_id=tmp_path, no_dist=True)
            epoch = schedule.state_dict()
        one()
    again, second, other, another = titan(config)
    again.load_state_dict(weights)
    found = {"optimizer": second.state_dict()}
    load(found, checkpoint_id=tmp_path, no_dist=True)
    second.load_state_dict(found["optimizer"])
    other.load_state_dict(epoch)
    for _ in range(2):
        another()
    dtypes = {value.dtype for values in container.optimizers[0].state.values() for value in values.values()}
    assert (torch.int8 in dtypes or torch.uint8 in dtypes) == ("state_dtype" in options)
    twins.assert_equal(model, again)
    twins.assert_states_equal(container.optimizers[0], second.optimizers[0])
