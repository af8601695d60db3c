"""timm's registry, fastai's Learner and mmengine's Runner."""

from functools import partial

import pytest
import torch
from fastai.basics import DataLoader, DataLoaders, Learner, OptimWrapper
from fastai.callback.training import GradientClip
from mmengine.model import BaseModel
from mmengine.optim import build_optim_wrapper
from mmengine.runner import Runner
from timm.optim import create_optimizer_v2
from timm.optim._optim_factory import default_registry

import fusedstep
from fusedstep.registry import register_with_timm
from tests.integrations import twins


@pytest.fixture(scope="module")
def names():
    return register_with_timm()


def stepped(model, optimizer, steps=3):
    x, y = twins.data()
    for _ in range(steps):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    return model


@pytest.mark.parametrize(
    ("ours", "theirs", "options"),
    [
        ("fusedadamw", "adamw", {}),
        ("fusedadamw", "adamw", {"eps": 1e-6, "betas": (0.8, 0.9)}),
        ("fusedsgd", "momentum", {"momentum": 0.8}),
        ("fusedlion", "lion", {}),
    ],
)
def test_timm_makes_ours_by_name_with_its_groups(ours, theirs, options, names):
    models = [twins.model(), twins.model()]
    made = [
        create_optimizer_v2(model, opt=name, lr=0.05, weight_decay=0.1, **options)
        for model, name in zip(models, (ours, theirs), strict=True)
    ]
    assert type(made[0]) is fusedstep.by_name(ours.removeprefix("fused"))
    # no decay for biases
    assert [g["weight_decay"] for g in made[0].param_groups] == [
        g["weight_decay"] for g in made[1].param_groups
    ]
    twins.assert_close(*(stepped(m, o) for m, o in zip(models, made, strict=True)))


def test_timm_makes_all_that_are_registered(names):
    assert {"fusedadamw", "fusedlamb", "fusedschedulefreesgd", "fusedprodigy"} <= {*names}
    for name in names:
        optimizer = create_optimizer_v2(twins.model(), opt=name, lr=0.01)
        assert type(optimizer) is default_registry.get_optimizer_class(name, bind_defaults=False)


def test_timms_lookahead_wraps_ours_and_trains_as_with_torchs(names):
    models = [twins.model(), twins.model()]
    made = [
        create_optimizer_v2(model, opt=f"lookahead_{name}", lr=0.05)
        for model, name in zip(models, ("fusedadamw", "adamw"), strict=True)
    ]
    # it looks back after six
    twins.assert_close(*(stepped(m, o, steps=8) for m, o in zip(models, made, strict=True)))
    assert "lookahead_slow_buff" in made[0].state_dict()["state"][0]


def test_another_prefix_leaves_timms_own_names_alone():
    theirs = default_registry.get_optimizer_info("fusednovograd")
    assert "ournovograd" in register_with_timm("our")
    assert default_registry.get_optimizer_info("fusednovograd") is theirs


def learner(opt, path, clip=None, **options):
    x, y = twins.data()
    batches = DataLoader([(a, b) for a, b in zip(x, y, strict=True)], bs=8)
    return Learner(
        DataLoaders(batches, batches, path=path),
        twins.model(),
        loss_func=torch.nn.MSELoss(),
        opt_func=partial(OptimWrapper, opt=opt, **options),
        cbs=[GradientClip(clip)] if clip else [],
        path=path,
    )


def quietly(of, epochs=1):
    with of.no_bar(), of.no_logging():
        of.fit(epochs, 0.02, wd=0.1)
    return of


def test_fastais_learner_trains_as_with_torchs(tmp_path):
    ours, theirs = (quietly(learner(opt, tmp_path)) for opt in (fusedstep.AdamW, torch.optim.AdamW))
    assert type(ours.opt.opt) is fusedstep.AdamW
    assert {group["weight_decay"] for group in ours.opt.opt.param_groups} == {0.1}
    twins.assert_close(ours.model, theirs.model)


def test_in_fastai_the_step_clips_as_its_callback_would(tmp_path):
    ours = quietly(learner(fusedstep.SGD, tmp_path, max_grad_norm=twins.LIMIT))
    theirs = quietly(learner(torch.optim.SGD, tmp_path, clip=twins.LIMIT))
    twins.assert_close(ours.model, theirs.model)
    twins.assert_differ(ours.model, quietly(learner(fusedstep.SGD, tmp_path)).model)


def test_fastai_saves_and_loads_bit_by_bit(tmp_path):
    first = quietly(learner(fusedstep.AdamW, tmp_path))
    first.save("half", with_opt=True)
    again = learner(fusedstep.AdamW, tmp_path)
    again.load("half", with_opt=True)
    again.opt.opt.step()  # it has no gradients
    twins.assert_states_equal(first.opt.opt, again.opt.opt)
    twins.assert_equal(first.model, again.model)


class Net(BaseModel):
    def __init__(self):
        super().__init__()
        self.layers = twins.model()

    def forward(self, x, y, mode="tensor"):
        return {"loss": torch.nn.functional.mse_loss(self.layers(x), y)}


def runner(path, steps=4, resume=False, **wrapper):
    torch.manual_seed(3)
    data = {
        "batch_size": 8,
        "sampler": {"type": "DefaultSampler", "shuffle": False},
        "dataset": twins.dataset(),
        "collate_fn": {"type": "default_collate"},
    }
    made = Runner(
        model=Net(),
        work_dir=str(path),
        train_dataloader=data,
        train_cfg={"by_epoch": False, "max_iters": steps},
        optim_wrapper=wrapper,
        default_hooks={"checkpoint": {"type": "CheckpointHook", "interval": 2, "by_epoch": False}},
        resume=resume,
        experiment_name="plugs",
        log_level="ERROR",
    )
    made.train()
    return made


def test_mmengine_takes_a_path_for_a_type_and_trains_as_with_torchs(tmp_path):
    ours = runner(tmp_path, optimizer={"type": "fusedstep.AdamW", "lr": 0.05})
    theirs = runner(tmp_path, optimizer={"type": "AdamW", "lr": 0.05})
    assert type(ours.optim_wrapper.optimizer) is fusedstep.AdamW
    twins.assert_close(ours.model, theirs.model)


def test_in_mmengine_the_step_clips_as_its_wrapper_would(tmp_path):
    ours = runner(tmp_path, optimizer={"type": "fusedstep.SGD", "lr": 0.1, "max_grad_norm": twins.LIMIT})
    clipped = {"clip_grad": {"max_norm": twins.LIMIT}}
    theirs = runner(tmp_path, optimizer={"type": "SGD", "lr": 0.1}, **clipped)
    twins.assert_close(ours.model, theirs.model)


def test_mmengine_resumes_bit_by_bit(tmp_path, monkeypatch):
    # what mmengine 0.10 saves beside the optimizer is more than tensors, which torch.load refuses since 2.6
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    options = {"optimizer": {"type": "fusedstep.AdamW", "lr": 0.05}}
    whole = runner(tmp_path / "whole", **options)
    runner(tmp_path / "parts", steps=2, **options)
    again = runner(tmp_path / "parts", resume=True, **options)
    assert again.iter == 4
    twins.assert_equal(whole.model, again.model)
    twins.assert_states_equal(whole.optim_wrapper.optimizer, again.optim_wrapper.optimizer)


def test_mmengines_decay_multipliers_make_groups_of_ours():
    config = {
        "optimizer": {"type": "fusedstep.AdamW", "lr": 0.05, "weight_decay": 0.1},
        "paramwise_cfg": {"bias_decay_mult": 0.0},
    }
    wrapper = build_optim_wrapper(Net(), config)
    assert {group["weight_decay"] for group in wrapper.optimizer.param_groups} == {0.1, 0.0}
