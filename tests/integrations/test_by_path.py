"""Frameworks that import an optimizer by a path in a configuration file: their own code makes ours."""

import pytest
import torch
from hydra.utils import instantiate
from litgpt.utils import instantiate_torch_optimizer
from nemo_automodel.components.optim.optimizer import build_optimizer
from omegaconf import OmegaConf

import fusedstep
from tests.integrations import beside, twins

beside.without_init("verl", "verl.workers", "verl.workers.config")
from verl.workers.config import optimizer as verl  # noqa: E402  (its package would import ray)

OPTIONS = {"lr": 0.05, "weight_decay": 0.1}


def by_hydra(model, module, **options):
    config = OmegaConf.create({"_target_": f"{module}.AdamW", "_partial_": True, **options})
    return instantiate(config)(params=model.parameters())


def by_nemo(model, module, **options):
    (optimizer,) = build_optimizer(model, (f"{module}.AdamW", options))
    return optimizer


def by_litgpt(model, module, **options):
    return instantiate_torch_optimizer(f"{module}.AdamW", model.parameters(), **options)


def by_litgpts_dictionary(model, module, **options):
    config = {"class_path": f"{module}.AdamW", "init_args": options}
    return instantiate_torch_optimizer(config, model.parameters(), fused=False)


def by_verl(model, module, lr, weight_decay, **options):
    config = verl.FSDPOptimizerConfig(
        lr=lr,
        weight_decay=weight_decay,
        optimizer="AdamW",
        optimizer_impl=module,
        override_optimizer_config=options or None,
    )
    return verl.build_optimizer(model.parameters(), config)


WAYS = {"hydra": by_hydra, "nemo": by_nemo, "litgpt": by_litgpt, "litgpt-dict": by_litgpts_dictionary}
WAYS["verl"] = by_verl
ways = pytest.mark.parametrize("build", WAYS.values(), ids=WAYS)


def stepped(model, optimizer, steps=3):
    x, y = twins.data()
    for _ in range(steps):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x.to(model[0].weight.dtype)).float(), y).backward()
        optimizer.step()
    return model


@ways
def test_a_path_makes_ours_which_trains_as_torchs_does(build):
    models = [twins.model(), twins.model()]
    ours, theirs = (
        build(m, module, **OPTIONS) for m, module in zip(models, ("fusedstep", "torch.optim"), strict=True)
    )
    assert type(ours) is fusedstep.AdamW
    assert type(theirs) is torch.optim.AdamW
    for name, value in OPTIONS.items():
        assert ours.param_groups[0][name] == theirs.param_groups[0][name] == value
    twins.assert_close(stepped(models[0], ours), stepped(models[1], theirs))


@ways
def test_a_dtype_may_be_a_name_and_options_of_ours_arrive(build):
    model = twins.model().bfloat16()
    optimizer = build(
        model, "fusedstep", state_dtype="torch.float32", max_grad_norm=0.5, statistics=True, **OPTIONS
    )
    stepped(model, optimizer)
    assert optimizer.state[model[0].weight]["exp_avg"].dtype == torch.float32
    assert optimizer.param_groups[0]["max_grad_norm"] == 0.5
    assert optimizer.statistics().clip_factor <= 1


class TwoWays:
    """As much of a mesh as NeMo asks for."""

    mesh_dim_names = ("tp",)

    def __getitem__(self, name):
        return self

    def size(self):
        return 2


def test_nemos_groups_and_its_word_on_foreach_are_taken():
    model = twins.model()
    overrides = [{"pattern": "bias", "lr_mult": 0.1, "wd_mult": 0.0}]
    options = {**OPTIONS, "param_group_overrides": overrides}
    (optimizer,) = build_optimizer(model, ("fusedstep.AdamW", options), device_mesh=TwoWays())
    assert [group.get("lr_mult") for group in optimizer.param_groups] == [None, 0.1]
    assert {group["foreach"] for group in optimizer.param_groups} == {False}
    stepped(model, optimizer)


def test_litgpt_drops_what_a_class_does_not_take():
    model = twins.model()
    optimizer = instantiate_torch_optimizer("fusedstep.Lion", model.parameters(), lr=0.1, fused=False, nosuch=1)
    assert type(optimizer) is fusedstep.Lion


def test_verl_gives_betas_to_those_whose_name_has_adam_in_it():
    model = twins.model()
    config = verl.FSDPOptimizerConfig(lr=0.1, optimizer="Lion", optimizer_impl="fusedstep", betas=(0.5, 0.6))
    assert verl.build_optimizer(model.parameters(), config).param_groups[0]["betas"] == (0.9, 0.99)
    config = verl.FSDPOptimizerConfig(lr=0.1, optimizer="AdamW", optimizer_impl="fusedstep", betas=(0.5, 0.6))
    assert verl.build_optimizer(model.parameters(), config).param_groups[0]["betas"] == (0.5, 0.6)
