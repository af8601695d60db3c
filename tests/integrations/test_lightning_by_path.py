"""Lightning's command line and Fabric with our classes; test_lightning.py has its Trainer."""

import lightning
import pytest
import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins import MixedPrecision
from lightning.pytorch.cli import LightningCLI

import fusedstep
from fusedstep.registry import CLASSES
from tests.integrations import twins


class Net(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = twins.model()

    def training_step(self, batch, index):
        x, y = batch
        return torch.nn.functional.mse_loss(self.layers(x), y)

    def train_dataloader(self):
        return torch.utils.data.DataLoader(twins.dataset(), batch_size=8)


QUIET = ["--trainer.accelerator=cpu", "--trainer.max_epochs=1", "--trainer.logger=false"]
QUIET += [f"--trainer.{name}=false" for name in ("enable_progress_bar", "enable_model_summary")]


def run(path, *arguments):
    return LightningCLI(
        Net,
        args=["fit", f"--trainer.default_root_dir={path}", *QUIET, *arguments],
        save_config_callback=None,
        seed_everything_default=0,
    )


def optimizer_of(cli):
    return cli.trainer.optimizers[0]


def test_a_class_path_trains_as_torchs_does(tmp_path):
    rest = ["--optimizer.lr=0.05", "--optimizer.betas=[0.8,0.9]"]
    ours = run(tmp_path, "--optimizer=fusedstep.AdamW", *rest)
    theirs = run(tmp_path, "--optimizer=torch.optim.AdamW", *rest)
    twins.assert_close(ours.model, theirs.model)
    assert type(optimizer_of(ours)) is fusedstep.AdamW
    assert optimizer_of(ours).param_groups[0]["betas"] == (0.8, 0.9)


def test_the_step_clips_once_and_as_the_trainer_would(tmp_path):
    ours = run(
        tmp_path, "--optimizer=fusedstep.SGD", "--optimizer.lr=0.1", f"--optimizer.max_grad_norm={twins.LIMIT}"
    )
    theirs = run(
        tmp_path,
        "--optimizer=torch.optim.SGD",
        "--optimizer.lr=0.1",
        f"--trainer.gradient_clip_val={twins.LIMIT}",
    )
    unclipped = run(tmp_path, "--optimizer=torch.optim.SGD", "--optimizer.lr=0.1")
    twins.assert_close(ours.model, theirs.model)
    twins.assert_differ(ours.model, unclipped.model)


# Muon takes matrices only, and the command line hands over all parameters
@pytest.mark.parametrize("name", [cls.__name__ for cls in CLASSES.values() if cls is not fusedstep.Muon])
def test_the_command_line_makes_every_optimizer(name, tmp_path):
    cli = run(tmp_path, f"--optimizer=fusedstep.{name}", "--trainer.fast_dev_run=true")
    assert type(optimizer_of(cli)).__name__ == name


def test_a_configuration_file_may_hold_what_only_ours_take(tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text(
        "optimizer:\n  class_path: fusedstep.AdamW\n  init_args:\n    lr: 0.01\n    state_dtype: float64\n"
        "    max_grad_norm: 1.0\n    statistics: true\n"
    )
    optimizer = optimizer_of(run(tmp_path, f"--config={file}"))
    assert optimizer.state_dtype is torch.float64
    assert optimizer.statistics().grad_norm > 0
    assert optimizer.param_groups[0]["max_grad_norm"] == 1.0


def fabric_run(make, clip=None, scaler=None, resume=None, path=None, steps=4):
    plugins = [MixedPrecision("16-mixed", "cpu", scaler)] if scaler else []
    fabric = Fabric(accelerator="cpu", devices=1, plugins=plugins)
    net = twins.model()
    net, optimizer = fabric.setup(net, make(net.parameters()))
    x, y = twins.data()
    first = 0
    if resume:
        first = fabric.load(resume, {"net": net, "optimizer": optimizer})["step"]
    for step in range(first, steps):
        loss = torch.nn.functional.mse_loss(net(x * (step + 1)), y)
        fabric.backward(loss)
        if clip:
            fabric.clip_gradients(net, optimizer, max_norm=clip)
        optimizer.step()
        optimizer.zero_grad()
        if path and step == 1:
            fabric.save(path, {"net": net, "optimizer": optimizer, "step": step + 1})
    return net, optimizer


def test_fabric_trains_as_with_torchs_and_the_step_clips():
    net, _ = fabric_run(lambda params: fusedstep.AdamW(params, lr=0.05, max_grad_norm=twins.LIMIT))
    other, _ = fabric_run(lambda params: torch.optim.AdamW(params, lr=0.05), clip=twins.LIMIT)
    twins.assert_close(net, other)


def test_fabric_resumes_bit_by_bit(tmp_path):
    make = lambda params: fusedstep.AdamW(params, lr=0.05, ema_decay=0.9)
    whole, first = fabric_run(make, path=tmp_path / "state")
    again, second = fabric_run(make, resume=tmp_path / "state")
    twins.assert_equal(whole, again)
    twins.assert_states_equal(first.optimizer, second.optimizer)


def test_fabric_scales_and_a_step_with_infinities_is_skipped():
    # the first gradients are scaled to infinity
    scaler = lambda: torch.amp.GradScaler("cpu", init_scale=2.0**24, backoff_factor=2.0**-10)
    scalers = [scaler(), scaler(), scaler()]
    net, _ = fabric_run(lambda params: fusedstep.SGD(params, lr=0.05), scaler=scalers[0])
    other, _ = fabric_run(lambda params: torch.optim.SGD(params, lr=0.05), scaler=scalers[1])
    fused, optimizer = fabric_run(lambda params: fusedstep.SGD(params, lr=0.05, fused=True), scaler=scalers[2])
    assert len({s.get_scale() for s in scalers}) == 1
    assert scalers[0].get_scale() < 2.0**24
    assert optimizer.optimizer.skipped_steps >= 1
    twins.assert_close(net, other, 5e-3)
    twins.assert_close(fused, other, 5e-3)
