"""Trains a small network with Lightning: an optimizer of ours in configure_optimizers, and nothing else to do.

    python examples/with_lightning.py --folder checkpoints

The step clips (max_grad_norm) and keeps a moving average of the weights (ema_decay) in the sweep of the update,
in place of Trainer(gradient_clip_val=...) and a callback. Lightning saves and loads both with the optimizer.
"""

import argparse

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

import fusedstep


class Net(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1))

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        inputs, targets = batch
        return mse_loss(self.layers(inputs), targets)

    def validation_step(self, batch: list[torch.Tensor], index: int) -> None:
        inputs, targets = batch
        self.log("loss", mse_loss(self.layers(inputs), targets))
        with self.optimizers().optimizer.ema_parameters():
            self.log("loss_of_average", mse_loss(self.layers(inputs), targets))

    def configure_optimizers(self) -> dict:
        optimizer = fusedstep.AdamW(self.parameters(), lr=1e-2, max_grad_norm=1.0, ema_decay=0.95)
        steps = self.trainer.estimated_stepping_batches
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def main() -> None:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--folder", default="lightning_logs", help="of checkpoints")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--resume", metavar="FILE", help="a checkpoint to go on from")
    args = parser.parse_args()

    lightning.seed_everything(0, verbose=False)
    inputs = torch.randn(1024, 8)
    data = TensorDataset(inputs, torch.sin(inputs.sum(1, keepdim=True)))
    keep = ModelCheckpoint(args.folder, "{epoch}", save_top_k=-1)
    quiet = dict.fromkeys(["logger", "enable_progress_bar", "enable_model_summary"], False)
    # no validation before the first step: there is no average yet
    options = {"devices": 1, "max_epochs": args.epochs, "num_sanity_val_steps": 0, **quiet}
    trainer = lightning.Trainer(callbacks=keep, **options)
    loaders = DataLoader(data, batch_size=32, shuffle=True), DataLoader(data, batch_size=1024)
    trainer.fit(Net(), *loaders, ckpt_path=args.resume)
    loss, averaged = (float(trainer.callback_metrics[name]) for name in ("loss", "loss_of_average"))
    print(f"{trainer.global_step} steps: loss {loss:.5f}, with averaged weights {averaged:.5f}")
    print(f"saved {keep.best_model_path}")


if __name__ == "__main__":
    main()
