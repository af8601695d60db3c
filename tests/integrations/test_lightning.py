"""Lightning's Trainer with our optimizers: mixed precision, clipping, schedulers, closures, checkpoints."""

import lightning
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import MixedPrecision
from torch.utils.data import DataLoader, TensorDataset

import fusedstep
from fusedstep.cli import references

# some gradients are larger, some are not
LIMIT = 5.0
# weights that differ in their last bit may be cast to neighbours in sixteen bits
TOLERANCE = {"32-true": 1e-5, "bf16-mixed": 5e-3, "16-mixed": 5e-3}


optimizers = pytest.mark.parametrize(
    ("ours", "theirs", "options"),
    [
        (fusedstep.SGD, torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}),
        # a smaller eps would make a whole step of a gradient that is but the noise of sixteen bits
        (fusedstep.AdamW, torch.optim.AdamW, {"lr": 0.05, "eps": 1e-2}),
        (fusedstep.Lamb, references.Lamb, {"lr": 0.2, "eps": 1e-2, "max_grad_norm": None}),
    ],
    ids=["sgd", "adamw", "lamb"],
)
pytestmark = pytest.mark.usefixtures("one_thread")
precisions = pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])


class Net(lightning.LightningModule):
    def __init__(self, make):
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
        self.make = make
        self.losses, self.rates = [], []

    def training_step(self, batch, index):
        x, y = batch
        loss = torch.nn.functional.mse_loss(self.layers(x), y)
        self.losses.append(loss.item())
        self.rates.append(self.optimizers().param_groups[0]["lr"])
        return loss

    def configure_optimizers(self):
        optimizer = self.make(self.parameters())
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 8, gamma=0.5)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def fit(make, checkpoint=None, precision="bf16-mixed", **options):
    """A net after twenty steps, in five epochs."""
    net = Net(make)
    x = torch.randn(32, 6)
    data = DataLoader(TensorDataset(x, x.square().sum(1, keepdim=True)), batch_size=8)
    quiet = dict.fromkeys(["logger", "enable_progress_bar", "enable_model_summary"], False)
    quiet["enable_checkpointing"] = "callbacks" in options
    trainer = lightning.Trainer(accelerator="cpu", precision=precision, max_epochs=5, **quiet, **options)
    trainer.fit(net, data, ckpt_path=checkpoint)
    return net


def fit_scaled(make, **options):
    """The same in float16, and its scaler; the first gradients are scaled to infinity."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20, backoff_factor=2.0**-6)
    net = fit(make, precision=None, plugins=MixedPrecision("16-mixed", "cpu", scaler), **options)
    return net, scaler


def assert_close(net, other, precision):
    tolerance = TOLERANCE[precision]
    for p, q in zip(net.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=tolerance, atol=tolerance)


@precisions
@optimizers
def test_clipped_by_the_trainer_it_gives_what_the_replaced_optimizer_gives(ours, theirs, options, precision):
    net = fit(lambda params: ours(params, **options), precision=precision, gradient_clip_val=LIMIT)
    other = fit(lambda params: theirs(params, **options), precision=precision, gradient_clip_val=LIMIT)
    assert_close(net, other, precision)


@precisions
@optimizers
def test_clipping_in_the_step_gives_what_clipping_by_the_trainer_gives(ours, theirs, options, precision):
    net = fit(lambda params: ours(params, **{**options, "max_grad_norm": LIMIT}), precision=precision)
    other = fit(lambda params: theirs(params, **options), precision=precision, gradient_clip_val=LIMIT)
    assert_close(net, other, precision)


@optimizers
def test_the_loss_goes_down_while_the_scheduler_lowers_the_rate(ours, theirs, options):
    net = fit(lambda params: ours(params, **options))
    assert sum(net.losses[-4:]) < 0.5 * sum(net.losses[:4])
    assert net.rates == [options["lr"] * 0.5 ** (i // 8) for i in range(20)]


@optimizers
def test_every_step_calls_the_closure_once_and_returns_its_loss(ours, theirs, options):
    returned = []

    class Recorded(ours):
        def step(self, closure):
            loss = super().step(closure)
            returned.append(loss.item())
            return loss

    net = fit(lambda params: Recorded(params, **options))
    assert len(returned) == 20
    assert returned == net.losses


@optimizers
def test_training_resumed_from_a_checkpoint_ends_where_training_without_a_stop_does(
    ours, theirs, options, tmp_path
):
    make = lambda params: ours(params, **{**options, "max_grad_norm": LIMIT})
    net, resumed = (
        fit(make, checkpoint, callbacks=ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1))
        for checkpoint in (None, tmp_path / "epoch=1.ckpt")
    )
    assert resumed.losses == net.losses[8:]
    assert resumed.rates == net.rates[8:]
    a, b = (n.optimizers().state for n in (net, resumed))
    for p, q in zip(net.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(p, q)
        assert a[p].keys() == b[q].keys()
        assert all(torch.equal(value, b[q][name]) for name, value in a[p].items())


@pytest.mark.parametrize("cls", [fusedstep.AdamW, torch.optim.AdamW], ids=["ours", "torchs"])
@pytest.mark.parametrize("fit", [fit_scaled, fit])  # Lightning asks whether or not there is a scaler
def test_the_trainer_refuses_to_clip_for_an_optimizer_that_unscales(fit, cls):
    with pytest.raises(RuntimeError, match="does not allow for gradient clipping"):
        fit(lambda params: cls(params, fused=True), gradient_clip_val=LIMIT)


@optimizers
def test_the_trainer_unscales_and_clips(ours, theirs, options):
    net, scaler = fit_scaled(lambda params: ours(params, **options), gradient_clip_val=LIMIT)
    other, reference = fit_scaled(lambda params: theirs(params, **options), gradient_clip_val=LIMIT)
    assert scaler.get_scale() == reference.get_scale() < 2.0**20
    assert_close(net, other, "16-mixed")


@pytest.mark.parametrize("fused", [None, True])
@optimizers
def test_the_step_clips_as_the_trainer_would(ours, theirs, options, fused):
    options_of_ours = {**options, "max_grad_norm": LIMIT, "fused": fused}
    net, scaler = fit_scaled(lambda params: ours(params, **options_of_ours))
    other, reference = fit_scaled(lambda params: theirs(params, **options), gradient_clip_val=LIMIT)
    assert scaler.get_scale() == reference.get_scale() < 2.0**20
    assert_close(net, other, "16-mixed")
