"""Frameworks for large models: torchtitan, LLM Foundry's registry, Composer, DeepSpeed."""

import catalogue
import deepspeed
import pytest
import torch
import torch.distributed as dist
from composer import Trainer
from composer.models import ComposerModel
from composer.algorithms import GradientClipping
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.state_dict_loader import load
from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig, default_adamw
from torchtitan.components.optimizer.lr_scheduler import LRSchedulersContainer
from torchtitan.distributed.utils import clip_grad_norm_

import fusedstep
from fusedstep.integrations.torchtitan import FusedOptimizers, fused
from fusedstep.registry import CLASSES
from tests.integrations import beside, twins

beside.without_init("llmfoundry", "llmfoundry.utils")
from llmfoundry.utils.registry_utils import construct_from_registry, create_registry  # noqa: E402

ADAMW = {"lr": 0.05, "betas": (0.9, 0.95), "weight_decay": 0.1}


def titan(config, steps=4, first=0, container=None):
    """As torchtitan's trainer steps: it clips, then its containers do the rest."""
    model = twins.model()
    container = config.build(model_parts=[model])
    schedule = LRSchedulersContainer.Config(warmup_steps=2).build(optimizers=container, training_steps=8)
    x, y = twins.data()
    return model, container, schedule, lambda: step(model, container, schedule, x, y)


def step(model, container, schedule, x, y):
    container.zero_grad()
    torch.nn.functional.mse_loss(model(x), y).backward()
    clip_grad_norm_([*model.parameters()], twins.LIMIT, foreach=True)
    container.step()
    schedule.step()


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


@pytest.mark.parametrize("options", [{}, {"state_dtype": "int8"}, {"ema_decay": 0.9}], ids=["plain", "int8", "ema"])
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
    twins.assert_equal(model, again)
    twins.assert_states_equal(container.optimizers[0], second.optimizers[0])


@pytest.fixture(scope="module")
def foundry():
    registry = create_registry("llmfoundry", "optimizers", generic_type=type, entry_points=True)
    yield registry
    catalogue._remove(("llmfoundry", "optimizers"))


@pytest.mark.parametrize("name", CLASSES)
def test_llm_foundrys_registry_finds_our_entry_points(name, foundry):
    params = [torch.nn.Parameter(torch.ones(2))]
    made = construct_from_registry(
        name=f"fused_{name}",
        registry=foundry,
        pre_validation_function=torch.optim.Optimizer,
        kwargs={"params": params, "lr": 0.1},
    )
    assert type(made) is CLASSES[name]


class Composed(ComposerModel):
    def __init__(self):
        super().__init__()
        self.layers = twins.model()

    def forward(self, batch):
        return self.layers(batch[0])

    def loss(self, outputs, batch):
        return torch.nn.functional.mse_loss(outputs, batch[1])


def composed(make, clip=None, **options):
    model = Composed()
    trainer = Trainer(
        model=model,
        optimizers=make(model.parameters()),
        train_dataloader=torch.utils.data.DataLoader(twins.dataset(), batch_size=8),
        algorithms=[GradientClipping("norm", clip)] if clip else [],
        max_duration="6ba",
        device="cpu",
        progress_bar=False,
        **options,
    )
    trainer.fit()
    return trainer


def test_composer_trains_as_with_torchs_and_the_step_clips_as_its_algorithm_would():
    ours = composed(lambda params: fusedstep.AdamW(params, lr=0.05, max_grad_norm=twins.LIMIT))
    theirs = composed(lambda params: torch.optim.AdamW(params, lr=0.05), clip=twins.LIMIT)
    twins.assert_close(ours.state.model, theirs.state.model)


def test_composer_resumes_bit_by_bit(tmp_path):
    make = lambda params: fusedstep.AdamW(params, lr=0.05)
    folder = {"save_folder": str(tmp_path), "save_interval": "3ba", "save_filename": "ba{batch}.pt"}
    whole = composed(make, **folder)
    again = composed(make, load_path=str(tmp_path / "ba3.pt"), load_weights_only=False)
    assert again.state.timestamp.batch == 6
    twins.assert_equal(whole.state.model, again.state.model)
    twins.assert_states_equal(whole.state.optimizers[0], again.state.optimizers[0])


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory):
    store = tmp_path_factory.mktemp("ranks") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def sped(make, stage, steps=3, resume=None, save=None, dtype=torch.bfloat16):
    model = twins.model().to(dtype)
    config = {
        "train_micro_batch_size_per_gpu": 32,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": twins.LIMIT,
        "bf16": {"enabled": dtype == torch.bfloat16},
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=make(model.parameters()), config=config, dist_init_required=False)
    x, y = twins.data()
    if resume:
        engine.load_checkpoint(str(resume))
    for i in range(2 if resume else 0, steps):
        loss = torch.nn.functional.mse_loss(engine(x.to(dtype)).float(), y)
        engine.backward(loss)
        engine.step()
        if save and i == 1:
            engine.save_checkpoint(str(save))
    return engine


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_deepspeed_steps_ours_as_torchs_and_clips_itself(stage):
    ours = sped(lambda params: fusedstep.AdamW(params, lr=0.05), stage)
    theirs = sped(lambda params: torch.optim.AdamW(params, lr=0.05), stage)
    assert type(ours.basic_optimizer) is fusedstep.AdamW
    twins.assert_close(ours.module, theirs.module, 1e-2)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_deepspeed_resumes_bit_by_bit(stage, tmp_path):
    make = lambda params: fusedstep.AdamW(params, lr=0.05)
    whole = sped(make, stage, steps=4, save=tmp_path)
    again = sped(make, stage, steps=4, resume=tmp_path)
    twins.assert_equal(whole.module, again.module)
