r"""Trains a small language model whose parameters, gradients and states are cut over all ranks (FSDP2).

One node:

    torchrun --standalone --nproc-per-node 2 examples/train_sharded.py

Several, the same command on each; HOST is one of them, FOLDER one that all of them see:

    torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29500 \
        --rdzv-id fusedstep examples/train_sharded.py --folder FOLDER

Ranks begin where the last checkpoint was made, and there may be more or fewer of them than before: --batch is
that of all ranks together, and its samples are drawn by the number of the step alone, so that the result
depends on the number of ranks only by rounding. To have torchrun start them again after one has failed, up to
three times, and with --nnodes 1:2 also with one node when the other is lost, if that is not HOST:

    TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --max-restarts 3 [...] examples/train_sharded.py

Without the variable they may hang: https://github.com/pytorch/pytorch/issues/135712

NCCL on GPUs, gloo without. The model is that of `fusedstep demo`: pip install '.[cli]'.
"""

import argparse
import os
import time
from importlib import resources
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import fusedstep
from fusedstep.cli.demo import CONTEXT, Model


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    classes = ("SGD", "Adam", "AdamW", "BertAdam", "Lamb")
    parser.add_argument("--optimizer", default="Lamb", choices=classes, help="one of fusedstep's")
    parser.add_argument("--lr", type=float, default=0.01, help="learning rate")
    parser.add_argument("--batch", type=int, default=32, help="samples a step, of all ranks together")
    parser.add_argument("--replicas", type=int, default=1, help="copies of the model, each cut (HSDP)")
    parser.add_argument("--bf16", action="store_true", help="compute in bfloat16; parameters stay float32")
    parser.add_argument("--steps", type=int, default=200, help="in all, with those of a checkpoint")
    parser.add_argument("--every", type=int, default=20, help="steps between two reports")
    parser.add_argument("--save-every", type=int, default=100, help="steps between two checkpoints")
    parser.add_argument("--folder", type=Path, default=Path("checkpoints"), help="of checkpoints")
    return parser.parse_args()


def cut(model: Model, args: argparse.Namespace, device: torch.device) -> None:
    sizes = args.replicas, dist.get_world_size() // args.replicas
    mesh = init_device_mesh(device.type, sizes, mesh_dim_names=("replica", "part"))
    # gradients are added up in float32, and the optimizer sees float32 only
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if args.bf16 else MixedPrecisionPolicy()
    for module in [*model.blocks, model]:
        fully_shard(module, mesh=mesh if args.replicas > 1 else mesh["part"], mp_policy=policy)


def samples(text: torch.Tensor, step: int, batch: int) -> torch.Tensor:
    """Those of this rank: each draws the places of all samples, and reads its own."""
    places = torch.randint(len(text) - CONTEXT, (batch, 1), generator=torch.Generator().manual_seed(step))
    return text[places[dist.get_rank() :: dist.get_world_size()] + torch.arange(CONTEXT + 1)]


def save(folder: Path, step: int, model: Model, optimizer: torch.optim.Optimizer) -> None:
    of_model, of_optimizer = get_state_dict(model, optimizer)
    dcp.save({"model": of_model, "optimizer": of_optimizer}, checkpoint_id=folder / f"{step:08}")


def load(folder: Path, model: Model, optimizer: torch.optim.Optimizer) -> int:
    """The step of the last checkpoint, which is loaded; 0 if there is none."""
    # .metadata is written last: a checkpoint without it was interrupted
    found = [max((int(file.parent.name) for file in folder.glob("[0-9]*/.metadata")), default=0)]
    # one rank looks for all: nodes may see a shared folder differently for a moment
    dist.broadcast_object_list(found)
    if found[0]:
        of_model, of_optimizer = get_state_dict(model, optimizer)
        dcp.load({"model": of_model, "optimizer": of_optimizer}, checkpoint_id=folder / f"{found[0]:08}")
        set_state_dict(model, optimizer, model_state_dict=of_model, optim_state_dict=of_optimizer)
    return found[0]


def train(args: argparse.Namespace, device: torch.device) -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if args.batch % ranks or ranks % args.replicas:
        found = f"--batch {args.batch}, {ranks} ranks, --replicas {args.replicas}"
        raise SystemExit(f"found {found}; each must be a multiple of the next")
    torch.manual_seed(0)  # the same weights on every rank, of which each keeps its part
    model = Model(characters=256)
    cut(model, args, device)
    make = getattr(fusedstep, args.optimizer)
    optimizer = make(model.parameters(), lr=args.lr, max_grad_norm=1.0, statistics=True)
    done = load(args.folder, model, optimizer)
    if rank == 0:
        print(f"ranks {ranks} device {device.type} steps done {done}", flush=True)

    text = torch.tensor([*resources.files("fusedstep.cli").joinpath("sonnets.txt").read_bytes()])
    for step in range(done + 1, args.steps + 1):
        loss = model(samples(text, step, args.batch).to(device))
        loss.backward()
        optimizer.step(zero_grad=True)
        if step % args.every == 0 or step == args.steps:
            mean = loss.detach().float() / ranks
            dist.all_reduce(mean)
            # they are of all ranks already, so one can ask alone
            if rank == 0:
                seen = optimizer.statistics()
                norms = (
                    f"gradient {seen.grad_norm:.3f} (x {seen.clip_factor:.3f}) update {seen.update_norm:.4f}"
                )
                print(f"step {step} loss {mean:.5f} {norms}", flush=True)
        if step % args.save_every == 0 or step == args.steps:
            save(args.folder, step, model, optimizer)


def main() -> None:
    args, device = arguments(), torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        dist.init_process_group("gloo")
    train(args, device)
    dist.destroy_process_group()
    if device.type == "cpu":
        # gloo's threads outlive their group, and one that lets go of a tensor only when Python has begun to end
        # aborts the process: https://github.com/pytorch/pytorch/issues/190489
        time.sleep(1)


if __name__ == "__main__":
    main()
