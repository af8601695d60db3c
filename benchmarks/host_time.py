"""Where the host time of one AdamW step over 400 tensors goes, ours and torch's in turn, and Lamb's.

    python benchmarks/host_time.py [cuda | cpu]

On a CPU the update itself is counted, too. Every sample starts after a synchronisation and ends when the call
returns. The parts are timed alone, in blocks of their own, so they are warmer than inside a step and add up to
less than it.
"""

import platform
import sys
import time

import torch

import fusedstep
from fusedstep._engines import Amp
from fusedstep.cli.shapes import MODELS

DEVICE = torch.device(sys.argv[1] if len(sys.argv) > 1 else "cuda")


def optimizer(cls, shapes, **options):
    params = [torch.nn.Parameter(torch.randn(shape, device=DEVICE)) for shape in shapes]
    for p in params:
        p.grad = torch.randn_like(p)
    made = cls(params, **options)
    made.step()
    made.step()
    return made


def main() -> None:
    tiny = MODELS["400 x 1024"]
    ours = optimizer(fusedstep.AdamW, tiny)
    theirs = optimizer(torch.optim.AdamW, tiny, fused=True)
    lamb = optimizer(fusedstep.Lamb, MODELS["bert-large"])
    plan = ours._plan
    table = plan.tables[0]
    parts = {
        "our step": ours.step,
        "  has anything changed": lambda: plan.refresh(ours, plan.spec),
        "  scalars": lambda: table.executable.prepare(0, Amp()),
        "  the update": lambda: table.executable.sweep(0, skips=False),
        "  version counters": lambda: [bucket.count_writes(plan.spec) for bucket in table.buckets],
        "torch fused step": theirs.step,
        "our Lamb step, bert-large": lamb.step,
    }
    samples: dict[str, list[float]] = {name: [] for name in parts}
    for _ in range(30):
        for name, part in parts.items():
            for i in range(11):
                if DEVICE.type == "cuda":
                    torch.cuda.synchronize()
                begin = time.perf_counter()
                part()
                if i > 2:  # the first warm up
                    samples[name].append(1e6 * (time.perf_counter() - begin))
    name = torch.cuda.get_device_name(DEVICE) if DEVICE.type == "cuda" else platform.processor()
    print(f"{name}, torch {torch.__version__}, microseconds")
    for name, times in samples.items():
        times.sort()
        p10, median, p90 = (times[len(times) * k // 10] for k in (1, 5, 9))
        print(f"{name:30} median {median:7.1f}   tenth {p10:7.1f}   nine tenths {p90:7.1f}")


if __name__ == "__main__":
    main()
