"""Which rows of the results a page shows."""

import results
import torch

# the torch dtype of parameters, by the names that results have
PARAMETERS = {"fp32": torch.float32, "bf16": torch.bfloat16, "bf16/fp32": torch.bfloat16, "fp16": torch.float16}
MODEL, LARGE_MODEL = "bert-large", "llama-1b"


def by_dtype(rows):
    """AdamW without options: (model, {dtype: row})."""
    models = dict.fromkeys(row.model for row in rows if " x " not in row.model and "groups" not in row.model)
    found = [(m, {d: results.find(rows, m, "AdamW", d) for d in ("fp32", "bf16", "bf16/fp32")}) for m in models]
    return [(model, cells) for model, cells in found if all(cells.values())]


def beside_peers(rows, model):
    """What was timed beside someone else's optimizer on a model: the best known, with and without clipping."""
    found = [row for row in rows if row.model == model and row.optimizer in ("AdamW", "SGD", "Lamb")]
    plain = {"momentum", "max_grad_norm", "scaler"}
    return [row for row in found if row.others and set(row.options) <= plain]


def along(rows):
    """What goes along with an update, on bert-large in float32."""
    calls = [("Lamb", {"max_grad_norm": None}), ("Lamb", {}), ("BertAdam", {})]
    calls += [("AdamW", {"max_grad_norm": 1.0}), ("AdamW", {"max_grad_norm": 1.0, "norm_type": float("inf")})]
    calls += [("AdamW", {"sharded": True, "max_grad_norm": 1.0}), ("functional.adamw_", {})]
    calls += [("AdamW", {"statistics": True}), ("AdamW", {"ema_decay": 0.999})]
    calls += [("AdamW", {"grad_scale": 1.0}), ("AdamW", {"max_grad_norm": 1.0, "scaler": True})]
    found = [results.find(rows, MODEL, name, **options) for name, options in calls]
    return [row for row in found if row is not None]


def family(rows, model):
    """One row for each optimizer that is not among those above, fastest first."""
    first = {}
    for row in rows:
        if row.model == model and row.dtype == "fp32" and hasattr(results.fusedstep, row.optimizer):
            # torch has nothing that is cautious
            alone = row._replace(peers={}) if row.options.get("cautious") else row
            first.setdefault((row.optimizer, bool(row.options.get("cautious"))), alone)
    known = {"AdamW", "Adam", "SGD", "Lamb", "BertAdam"}
    found = [row for (name, _), row in first.items() if name not in known or row.options.get("cautious")]
    return sorted(found, key=lambda row: row.ours)


def marked(row):
    """With a note on peers that take another step: nobody else has a cautious AdamW."""
    if not row.options.get("cautious"):
        return row
    return row._replace(notes={**dict.fromkeys(row.peers, "not cautious"), **row.notes})


def stored(rows, model):
    """AdamW by how it is stored: (row, bytes a parameter), most bytes first."""
    storage = {"state_dtype", "master", "rounding"}
    found = [r for r in rows if r.model == model and r.optimizer == "AdamW" and set(r.options) <= storage]
    sized = []
    for row in found:
        states = {"state_dtype": torch.float32} if row.dtype == "bf16/fp32" else {}
        sized.append((row, results.stored_bytes("AdamW", PARAMETERS[row.dtype], {**states, **row.options})))
    return sorted(sized, key=lambda pair: (-pair[1], -pair[0].ours))


def loops(kind):
    """Loops with a peer, those first in which we gain most."""
    found = [row for name in results.files(kind) for row in results.load(name)["results"] if row.get("peer")]
    return sorted(found, key=lambda row: -row["peer"]["median"] / row["ours"]["median"])
