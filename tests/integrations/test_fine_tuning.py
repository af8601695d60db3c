"""axolotl's, ms-swift's and LLaMA-Factory's own code makes our optimizers from what their files say."""

import doctest
import types

import pytest
import torch
from transformers import Trainer, TrainingArguments

import fusedstep
from tests.integrations import beside, twins
from tests.integrations.test_hugging_face import QUIET, SCHEDULE, llama, losses, rows

# their packages import kernels, servers and clients; what makes an optimizer needs none of these
beside.without_init("axolotl.core", "axolotl.core.trainers", "axolotl.core.trainers.mixins")
beside.without_init("swift", "swift.optimizers")

from axolotl.core.trainers.mixins.optimizer import OptimizerMixin  # noqa: E402
from axolotl.integrations.base import PluginManager  # noqa: E402
from axolotl.utils.dict import DictDefault  # noqa: E402


class AxolotlArguments(TrainingArguments):
    loraplus_lr_ratio = embedding_lr_scale = embedding_lr = lr_groups = None


class AxolotlTrainer(OptimizerMixin, Trainer):
    """As axolotl's own, of which this mixin is the part that makes optimizers."""


def axolotl(path, config=None):
    args = AxolotlArguments(path, **QUIET, **SCHEDULE, max_grad_norm=twins.LIMIT)
    trainer = AxolotlTrainer(llama(), args, train_dataset=rows())
    if config is None:
        # as its builder does for optimizers that it knows; embeddings are not decayed then
        options = {"lr": args.learning_rate, "eps": args.adam_epsilon}
        trainer.optimizer_cls_and_kwargs = (torch.optim.AdamW, options)
    else:
        manager = PluginManager()
        manager.register("fusedstep.integrations.axolotl.Plugin")
        manager.post_trainer_create(DictDefault(config), trainer)
    trainer.train()
    return trainer


def test_axolotls_plugin_trains_as_with_torchs_and_clips_once(tmp_path):
    ours = axolotl(tmp_path, {"fusedstep": {"name": "adamw", "statistics": True}})
    theirs = axolotl(tmp_path)
    optimizer = ours.optimizer.optimizer
    assert type(optimizer) is fusedstep.AdamW
    assert optimizer.statistics().grad_norm > twins.LIMIT
    assert {group["weight_decay"] for group in optimizer.param_groups} == {0.1, 0.0}
    twins.assert_close(ours.model, theirs.model)
    assert losses(ours) == pytest.approx(losses(theirs), rel=1e-4)


def test_without_an_entry_axolotls_plugin_makes_adamw(tmp_path):
    assert type(axolotl(tmp_path, {}).optimizer.optimizer) is fusedstep.AdamW


def test_axolotl_is_told_of_the_entry(tmp_path):
    from fusedstep.integrations import axolotl as ours

    module, name = ours.Plugin().get_input_args().rsplit(".", 1)
    assert (module, name) == (ours.__name__, "FusedstepArgs")
    assert ours.FusedstepArgs(fusedstep={"name": "lion"}).model_dump() == {"fusedstep": {"name": "lion"}}


@pytest.fixture
def swift(monkeypatch):
    """ms-swift's class and its table; the table's own file imports all of its optimizers."""
    from swift.optimizers.base import OptimizerCallback

    package = __import__("swift.optimizers", fromlist=["optimizers"])
    monkeypatch.setattr(package, "OptimizerCallback", OptimizerCallback, raising=False)
    monkeypatch.setattr(package, "optimizers_map", {"default": OptimizerCallback}, raising=False)
    from fusedstep.integrations import ms_swift

    package.optimizers_map.update(ms_swift.optimizers_map)
    return package.optimizers_map


def swiftly(path, table, name, **arguments):
    args = TrainingArguments(path, **{**QUIET, **SCHEDULE, "max_grad_norm": twins.LIMIT, **arguments})
    args.optimizer = name
    trainer = Trainer(llama(), args, train_dataset=rows())
    # as swift/trainers/mixin.py does
    callback = table[args.optimizer or "default"](args, trainer)
    trainer.create_optimizer = callback.create_optimizer
    trainer.train()
    return trainer


def test_ms_swift_makes_ours_by_name_and_trains_as_its_default(tmp_path, swift):
    ours = swiftly(tmp_path, swift, "fused_adamw", optim_args="statistics=true")
    theirs = swiftly(tmp_path, swift, None, optim="adamw_torch")
    assert type(ours.optimizer.optimizer) is fusedstep.AdamW
    assert ours.optimizer.optimizer.statistics().grad_norm > twins.LIMIT
    twins.assert_close(ours.model, theirs.model)


@pytest.mark.usefixtures("swift")
def test_the_example_in_the_docstring_of_the_callback_is_right():
    from fusedstep.integrations import ms_swift

    assert doctest.testmod(ms_swift) == (0, 1)


def factory(name=None, **options):
    from llamafactory.v1.core.base_trainer import BaseTrainer

    model = twins.model()
    args = types.SimpleNamespace(optim_config=None, learning_rate=0.05)
    if name:
        from llamafactory.v1.config.arg_utils import PluginConfig

        import fusedstep.integrations.llama_factory  # noqa: F401

        args.optim_config = PluginConfig({"name": name, **options})
    trainer = types.SimpleNamespace(model=model, args=args)
    BaseTrainer._init_optimizer(trainer)
    x, y = twins.data()
    for _ in range(3):
        trainer.optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x), y).backward()
        trainer.optimizer.step()
    return trainer


def test_llama_factorys_version_1_makes_ours_by_name_and_steps_as_its_default():
    ours, theirs = factory("fused_adamw", lr="0.05", statistics=True), factory()
    assert type(theirs.optimizer) is torch.optim.AdamW
    assert type(ours.optimizer) is fusedstep.AdamW
    assert ours.optimizer.statistics().grad_norm > 0
    twins.assert_close(ours.model, theirs.model)
