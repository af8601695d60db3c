"""What a step costs on many ranks: a model of bytes and messages, and how it compares with what was measured.

    python benchmarks/at_scale.py

A step of parameters that are cut over all ranks (FSDP2) moves every rank's share of bytes through its memory,
and takes a few all-reduces of small vectors: eight bytes for every tensor and sum. That is all; the model puts
times to both. It is compared with steps of one H200, read from the benchmark's raw result, and with processes
that it starts here, which talk by gloo. Leaves at_scale.json and at_scale.png beside it; takes a minute or two.
"""

import json
import math
import statistics
import tempfile
import time
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch.distributed.tensor import DTensor, Shard

import fusedstep
from fusedstep.cli.moved import bytes_per_parameter, program_of
from fusedstep.cli.shapes import MODELS
from fusedstep.cli.works import Work

HERE = Path(__file__).parent
GPUS_PER_NODE = 8
# bytes of one
MEMORY = 141e9
# of a model with a trillion parameters, about: twelve in each of a hundred layers
TENSORS = 1200


class Kind(NamedTuple):
    """A step, by its name."""

    name: str
    work: Work

    @property
    def sums(self) -> int:
        """Of every tensor, over all ranks that hold parts of it."""
        return sum(map(len, self._kinds))

    @property
    def all_reduces(self) -> int:
        return sum(len([*groupby(kinds)]) for kinds in self._kinds)

    @property
    def _kinds(self) -> list[list[str]]:
        """How each sweep sums."""
        return [[fold.kind for fold in sweep.folds] for sweep in program_of(self.work).sweeps]


KINDS = [
    Kind("AdamW", Work("bert-large", "AdamW", {}, "fp32", ())),
    Kind("AdamW, clipped", Work("bert-large", "AdamW", {"max_grad_norm": 1.0}, "fp32", ())),
    Kind(
        "AdamW bf16, fp32 states, clipped",
        Work("bert-large", "AdamW", {"max_grad_norm": 1.0}, "bf16/fp32", ()),
    ),
    Kind("Lamb, clipped", Work("bert-large", "Lamb", {}, "fp32", ())),
]


# the model


def memory_time(step: Kind, parameters: float, ranks: int, bandwidth: float) -> float:
    """Milliseconds to move this rank's share, at `bandwidth` bytes a millisecond."""
    return bytes_per_parameter(step.work) * parameters / ranks / bandwidth


def all_reduce_time(ranks: int) -> float:
    """Milliseconds for a small vector, by the latencies that NCCL itself chooses its algorithms with.

    A tree: there and back, 0.52 us between GPUs of a node, one after the other, 1.8 times that if there are
    several nodes, 5 us between those, by halves, and 4.4 us to begin (NVIDIA/nccl, src/graph/tuning.cc at
    commit 01afd20, NVLink and network, protocol LL; later ones differ by a few).
    """
    nodes = max(1, ranks / GPUS_PER_NODE)
    within = (min(ranks, GPUS_PER_NODE) - 1) * 0.52 * (1.8 if nodes > 1 else 1)
    return 1e-3 * (4.4 + 2 * (within + 5.0 * math.log2(nodes))) if ranks > 1 else 0.0


def sent(step: Kind, ranks: int) -> tuple[int, int]:
    """Messages and bytes that a rank sends: to its parent in the tree, and to two children."""
    messages = 3 * step.all_reduces if ranks > 1 else 0
    return messages, 3 * 8 * TENSORS * step.sums if ranks > 1 else 0


# what was measured


def on_one_gpu(raw: dict) -> list[dict]:
    """Device times of the benchmark beside bytes / bandwidth."""
    rows = []
    for step in KINDS:
        for r in raw["results"]:
            wanted = step.work.optimizer, step.work.options, step.work.dtype
            if (r["optimizer"], r["options"], r["dtype"]) == wanted and r["model"] in (
                "bert-large",
                "llama-1b",
            ):
                parameters = sum(math.prod(shape) for shape in MODELS[r["model"]])
                model = memory_time(step, parameters, 1, raw["copy_bandwidth"])
                rows.append({"step": step.name, "parameters": parameters, "ranks": 1, "model": model})
                rows[-1]["measured"] = r["ours"]["device"]
    return rows


def on_a_rank(rank: int, ranks: int, folder: str, rounds: int = 60) -> None:
    """Times of a rank, for several numbers of tensors: steps, and an all-reduce alone."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    mesh, found = dist.init_device_mesh("cpu", (ranks,)), []
    for tensors in (4, 40, 400, 4000):
        options: list[dict] = [{}, {"max_grad_norm": 1.0}]
        steps = {}
        for step, optional in zip(("plain", "clipped"), options, strict=True):
            params = []
            for _ in range(tensors):
                p = torch.nn.Parameter(DTensor.from_local(torch.randn(16), mesh, [Shard(0)]))
                p.grad = DTensor.from_local(torch.randn(16), mesh, [Shard(0)])
                params.append(p)
            steps[step] = fusedstep.AdamW(params, **optional).step
        vector = torch.zeros(tensors, dtype=torch.float64)
        steps["all-reduce"] = lambda vector=vector: dist.all_reduce(vector)
        # what a clip costs where nobody has to be asked
        plain = [torch.nn.Parameter(torch.randn(16)) for _ in range(tensors)]
        for p in plain:
            p.grad = torch.randn(16)
        for step, optional in zip(("alone", "alone, clipped"), options, strict=True):
            steps[step] = fusedstep.AdamW(plain, **optional).step
        times: dict[str, list[float]] = {name: [] for name in steps}
        for i in range(rounds):
            for name, step in steps.items():
                dist.barrier()
                begin = time.perf_counter()
                step()
                if i >= 5:
                    times[name].append(1e3 * (time.perf_counter() - begin))
        found.append({"tensors": tensors, **{name: statistics.median(t) for name, t in times.items()}})
    if rank == 0:
        (Path(folder) / "found.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def on_cpus(ranks: int) -> list[dict]:
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(on_a_rank, (ranks, folder), nprocs=ranks)
        rows = json.loads((Path(folder) / "found.json").read_text())
    for row in rows:
        # a clipped step is a plain one, a pass over gradients, and one all-reduce
        row["model"] = row["plain"] + row["alone, clipped"] - row["alone"] + row["all-reduce"]
        row |= {"ranks": ranks, "measured": row["clipped"]}
    return rows


# shown


def table(title: str, columns: list[str], rows: list[list[str]]) -> Table:
    view = Table(title=title)
    for i, column in enumerate(columns):
        view.add_column(column, justify="left" if i == 0 else "right")
    for row in rows:
        view.add_row(*row)
    return view


def at_scale(bandwidth: float) -> list[dict]:
    rows = []
    for step in KINDS[1:]:
        for parameters, ranks in ((1e9, 1), (1e9, 8), (1e10, 64), (1e11, 512), (1e12, 1024), (1e12, 10_000)):
            messages, bytes_sent = sent(step, ranks)
            memory, talk = (
                memory_time(step, parameters, ranks, bandwidth),
                step.all_reduces * all_reduce_time(ranks),
            )
            moved = bytes_per_parameter(step.work) * parameters / ranks
            rows.append({"step": step.name, "parameters": parameters, "ranks": ranks, "moved": moved})
            rows[-1] |= {"messages": messages, "sent": bytes_sent, "memory": memory, "all-reduces": talk}
    return rows


def chart(bandwidth: float, measured: list[dict], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    step = KINDS[-1]
    figure, axes = plt.subplots(figsize=(7.5, 4.5), layout="constrained")
    ranks = [2**i for i in range(14)] + [10_000]
    for i, parameters in enumerate((1e9, 1e10, 1e11, 1e12)):
        # parameter, gradient and two moments must fit
        enough = [r for r in ranks if 16 * parameters / r <= MEMORY]
        times = [memory_time(step, parameters, r, bandwidth) for r in enough]
        axes.plot(enough, times, color="#2a6f97", alpha=0.4 + 0.2 * i)
        name = f"$10^{{{round(math.log10(parameters))}}}$ parameters"
        axes.annotate(name, (enough[0], times[0]), (4, 3), textcoords="offset points")
    talk = [step.all_reduces * all_reduce_time(r) for r in ranks[1:]]
    axes.plot(ranks[1:], talk, color="#c1121f", label=f"its {step.all_reduces} all-reduces (NCCL's own model)")
    for row in measured:
        if row["step"] == step.name:
            label = f"measured, {row['parameters'] / 1e6:.0f} million parameters"
            axes.plot(row["ranks"], row["measured"], "o", color="black", label=label)
    axes.set(xscale="log", yscale="log", xlabel="ranks", ylabel="milliseconds a step")
    axes.set_title(
        f"{step.name}, fp32, H200s, everything cut over all ranks: memory (blue) and messages (red)",
        fontsize=10,
    )
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower left")
    figure.savefig(path, dpi=130)
    plt.close(figure)


def main() -> None:
    console = Console(width=120)
    raw = json.loads((HERE / "cuda-nvidia-h200.json").read_text())
    one_gpu = on_one_gpu(raw)
    rows = [
        [
            r["step"],
            f"{r['parameters']:.3g}",
            f"{r['model']:.3f}",
            f"{r['measured']:.3f}",
            f"{r['measured'] / r['model']:.3f}",
        ]
        for r in one_gpu
    ]
    console.print(table("one H200, milliseconds", ["step", "parameters", "model", "measured", "ratio"], rows))
    cpus = []
    for ranks in (1, 2, 4):
        with console.status(f"{ranks} processes"):
            cpus += on_cpus(ranks)
    rows = [
        [
            str(r["ranks"]),
            str(r["tensors"]),
            *(f"{r[k]:.3f}" for k in ("plain", "all-reduce", "model", "measured")),
            f"{r['measured'] / r['model']:.2f}",
        ]
        for r in cpus
    ]
    columns = ["processes", "tensors", "not clipped", "all-reduce", "model", "clipped", "ratio"]
    console.print(table("gloo on this machine's cores, AdamW, milliseconds", columns, rows))
    scale = at_scale(raw["copy_bandwidth"])
    rows = [
        [
            r["step"],
            f"{r['parameters']:.0e}",
            f"{r['ranks']:,}",
            f"{r['moved'] / 1e9:.2f}",
            f"{r['memory']:.2f}",
        ]
        + [str(r["messages"]), f"{r['sent'] / 1e3:.0f}", f"{r['all-reduces']:.3f}"]
        for r in scale
    ]
    columns = ["step", "parameters", "ranks", "GB moved", "ms", "messages", "KB sent", "ms"]
    console.print(table(f"the model, of each rank, {TENSORS} tensors", columns, rows))
    facts = {
        "torch": torch.__version__,
        "gpu": {k: raw[k] for k in ("device", "torch", "commit", "copy_bandwidth")},
    }
    found = {**facts, "one_gpu": one_gpu, "gloo": cpus, "model": scale}
    (HERE / "at_scale.json").write_text(json.dumps(found, indent=1) + "\n")
    chart(raw["copy_bandwidth"], one_gpu, HERE / "at_scale.png")


if __name__ == "__main__":
    main()
