"""Which pictures the performance page has, and what is in them."""

import pictures
import results
import selection

OURS = "fusedstep"


def all_pictures():
    """Every picture by its name, as svg."""
    gpu = results.rows("cuda")
    models = [(model, cells) for model, cells in selection.by_dtype(gpu) if cells["fp32"].ours > 1]
    beside, family = (select(gpu, selection.MODEL) for select in (selection.beside_peers, selection.family))
    found = {
        "adamw": pictures.bars("adamw", _by_model(models)),
        "peers": pictures.bars("peers", [_group(row) for row in beside]),
        # for a stranger: one optimizer, and everybody who has it
        "everybody": pictures.bars(
            "everybody", [_group(r) for r in beside if r.optimizer == "AdamW" and r.dtype in ("fp32", "bf16")]
        ),
        "family": pictures.bars("family", [_group(row) for row in family]),
        "memory": pictures.points("memory", _sizes(selection.stored(gpu, selection.LARGE_MODEL))),
    }
    for device in ("cuda", "cpu"):
        loops = [row for row in selection.loops(f"host-{device}") if "engine torch" not in row["loop"]]
        times = [(row["loop"], row["ours"]["median"] / 1e3, row["peer"]["median"] / 1e3) for row in loops]
        found[f"host-{device}"] = pictures.dumbbells(f"host-{device}", times)
    return found


def _by_model(models):
    """Ours and torch's fused one, which most people have."""
    found = []
    for model, cells in models:
        for dtype, row in cells.items():
            torch = [(who, time) for who, time in row.others.items() if who == "torch fused"]
            label = f"{model}\n{results.DTYPES.get(dtype, dtype)}"
            found.append((label, row.limit, [(OURS, row.ours), *torch]))
    return found


def _group(row):
    options = "\n".join(_words(row.options))
    label = f"{row.optimizer}, {row.dtype}" if row.dtype != "fp32" else row.optimizer
    return (f"{label}\n{options}" if options else label, row.limit, _times(row))


def _times(row):
    return [(OURS, row.ours), *row.others.items()]


def _words(options):
    """Options as a picture has room for them."""
    if options.get("scaler"):
        return ["scaled, clipped"]
    if "max_grad_norm" in options:
        return ["not clipped" if options["max_grad_norm"] is None else "clipped"]
    shown = {name: value for name, value in options.items() if name != "weight_decay"}
    return [name if value is True else f"{name} {value}" for name, value in shown.items()]


def _sizes(stored):
    """Ours by how they are stored, and peers of those that are compressed, where their memory is known."""
    found = {_setting(row): (size, row.ours, True) for row, size in stored}
    for row in (row for row, _ in stored if row.options):
        for name, more in row.allocated.items():
            if name in row.others:
                size = 2 * selection.PARAMETERS[row.dtype].itemsize + more
                found.setdefault(name, (size, row.others[name], False))
    return [(label, *point) for label, point in found.items()]


def _setting(row):
    """How a row is stored, in few words."""
    short = {"float32": "fp32", "bfloat16": "bf16"}
    states = row.options.get("state_dtype", row.dtype.rpartition("/")[2])
    words = ["fp32"] if row.dtype == "fp32" else [f"{short.get(states, states)} states"]
    if "master" in row.options:
        words.append(f"{short.get(row.options['master'], row.options['master'])} master")
    return ", ".join(words + ["stochastic"] * ("rounding" in row.options))
