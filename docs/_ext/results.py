"""What `fusedstep bench` measured and the repository keeps, read for the pages.

Files are read tolerantly: a row has a model, an optimizer and our time; all else may be missing, and keys
that are not known here are left alone.
"""

import json
import statistics
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch

import fusedstep

KINDS = ("cuda", "end-to-end", "cpu", "host", "cold", "quality", "muon", "release", "offload")
FOLDER = Path(__file__).parents[2] / "benchmarks"
# how the names of dtypes in results are written in pages
DTYPES = {"bf16/fp32": "bf16, fp32 states"}

# which of torch's optimizers have a fused step on every device
_FUSED = ("Adam", "AdamW", "SGD")


class Row(NamedTuple):
    """An optimizer on a model: milliseconds of ours, of every peer, and what a copy of its bytes would take."""

    model: str
    optimizer: str
    options: dict[str, Any]
    dtype: str
    ours: float
    host: float | None
    limit: float | None
    peers: dict[str, float]
    # what peers say of how their work differs
    notes: dict[str, str]
    # bytes a parameter that peers allocated beside parameters and gradients
    allocated: dict[str, float]

    @property
    def call(self):
        words = (f"{name}={_text(value)}" for name, value in self.options.items())
        return f"{self.optimizer}({', '.join(words)})"

    @property
    def share(self):
        """Of the limit that was reached."""
        return None if self.limit is None else self.limit / self.ours

    @property
    def others(self):
        """Peers that are not our own classes, and whose results are right, fastest first."""
        named = ((name, ms) for name, ms in self.peers.items() if not name.startswith("fusedstep."))
        return dict(sorted(((n, ms) for n, ms in named if n not in self.wrong), key=lambda pair: pair[1]))

    @property
    def wrong(self):
        """By how much peers are off whose results disagree with float64."""
        return {name: note for name, note in self.notes.items() if note.startswith("off by")}


def _text(value):
    return f'"{value}"' if isinstance(value, str) else str(value)


def _milliseconds(side, which="device"):
    """A time, as a number or in a dict of several; None where there is none."""
    found = side.get(which) if isinstance(side, dict) else side
    return float(found) if isinstance(found, (int, float)) and not isinstance(found, bool) else None


def load(name):
    return json.loads((FOLDER / name).read_text())


def files(kind):
    """Names of results such as `cuda-*.json`; those of everything before those of a part."""
    return sorted((path.name for path in FOLDER.glob(f"{kind}-*.json")), key=lambda name: (len(name), name))


def rows(kind):
    """All rows of a kind of device, each once: where two files have it, the one of everything counts, beside
    the peers of all.
    """
    found = {}
    for name in files(kind):
        for row in filter(None, map(_row, load(name)["results"])):
            key = row.model, row.optimizer, str(row.options), row.dtype
            found[key] = _joined(found[key], row) if key in found else row
    return list(found.values())


def _joined(row, other):
    """A row with the peers of another run, as many times ours as they were there."""
    peers = {name: ms / other.ours * row.ours for name, ms in other.peers.items()}
    return row._replace(
        peers={**peers, **row.peers},
        notes={**other.notes, **row.notes},
        allocated={**other.allocated, **row.allocated},
    )


class Speeds(NamedTuple):
    """GB/s."""

    slowest: float
    median: float
    fastest: float


def memory_speeds(kind):
    """How fast memory was when each row was timed, read and written."""
    copies = [row["copy"] for name in files(kind) for row in load(name)["results"] if "copy" in row]
    found = [copy["bytes"] / copy["device"] / 1e6 for copy in copies]
    return Speeds(min(found), statistics.median(found), max(found))


def _who(name):
    """A peer as pages call it; results of earlier versions have the class there."""
    package, _, rest = name.partition(".")
    if package == "torch":
        return "torch fused" if rest.rpartition(".")[2] in _FUSED else "torch"
    return package if package in ("timm", "pytorch_optimizer") else name


def _row(raw):
    ours = _milliseconds(raw.get("ours") or {})
    if ours is None:
        return None
    sides = {_who(name): side for name, side in (raw.get("peers") or {}).items()}
    peers = {name: _milliseconds(side) for name, side in sides.items()}
    told = {name: side for name, side in sides.items() if isinstance(side, dict)}
    count = raw.get("parameters")
    return Row(
        model=raw["model"],
        optimizer=raw["optimizer"],
        options=raw.get("options") or {},
        dtype=raw.get("dtype", "fp32"),
        ours=ours,
        host=_milliseconds(raw["ours"], "host"),
        limit=_milliseconds(raw.get("limit")),
        peers={name: ms for name, ms in peers.items() if ms is not None},
        notes={name: side["note"] for name, side in told.items() if side.get("note")},
        allocated={name: side["memory"] / count for name, side in told.items() if count and side.get("memory")},
    )


def find(among, model, optimizer, dtype="fp32", **options):
    """The one row of this description; None where it was not measured."""
    wanted = (model, optimizer, dtype, options)
    return next((row for row in among if (row.model, row.optimizer, row.dtype, row.options) == wanted), None)


def sources(kind):
    """Files, devices, versions and commits, for the line that says where numbers come from."""
    return [(name, load(name)) for name in files(kind)]


def stored_bytes(optimizer, dtype, options):
    """Bytes a parameter with its gradient and all that is kept for it, counted after a step."""
    p = torch.nn.Parameter(torch.zeros(64, 64, dtype=dtype))
    p.grad = torch.zeros_like(p)
    made = getattr(fusedstep, optimizer)([p], **options)
    made.step()
    kept = [tensor for name, tensor in made.state[p].items() if name != "step"]
    return sum(tensor.numel() * tensor.itemsize for tensor in (p, p.grad, *kept)) / p.numel()


def quality():
    """Setting, final loss, its difference to float32 in percent, and the largest of a seed; from the script."""
    sys.path.insert(0, str(FOLDER))
    try:
        from quality import table
    finally:
        sys.path.remove(str(FOLDER))
    (name,) = files("quality")
    return table(load(name)["losses"])
