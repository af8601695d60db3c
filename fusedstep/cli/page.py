"""A result of `fusedstep bench` as one page of HTML, which is complete in itself."""

from __future__ import annotations

import html
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from . import noise
from .report import (
    bars_of,
    left_out_of,
    milliseconds,
    scale_of,
    size_of,
    speed_of,
    title_of,
    trouble_of,
)


def page(result: dict[str, Any]) -> str:
    """All of a result as one file of HTML, in light and dark, with its own style and no requests."""
    style = Path(__file__).with_name("report.css").read_text()
    where = html.escape(f"{result['device']}, torch {result['torch']}")
    models: dict[str, list[dict[str, Any]]] = {}
    for row in result["results"]:
        models.setdefault(row["model"], []).append(row)
    body = "\n".join(_section(model, rows, result) for model, rows in models.items())
    links = " · ".join(f'<a href="#{html.escape(m)}">{html.escape(m)}</a>' for m in models)
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>fusedstep bench: {where}</title><style>{style}</style></head><body>
<h1>How long does an optimizer step take?</h1>
<p>Measured on <b>{where}</b> by <code>fusedstep bench</code>: each bar is one step of one implementation, over
all parameters of a model, in milliseconds (medians; all took turns in one run). <b>Shorter is better.</b></p>
<p>The <span class="line">dashed line</span> is the physical limit: the bytes that the step must read and write,
at the speed of a plain pass over memory on this machine{_in_brackets(speed_of(result))}. {_of_light(result)}
Every case was first compared with float64, as was every implementation beside it but for those in 8 bits; what
disagrees has no times here.</p>
{_noise(result)}{_facts(result)}
<nav>{links}</nav>
{body}
</body></html>
"""


def _of_light(result: dict[str, Any]) -> str:
    if "threads" in result:
        return "Models that fit into the processor's caches can be faster than that."
    return "The light part of a bar is what a loop of nothing but steps takes where the host is the slower one."


def _noise(result: dict[str, Any]) -> str:
    told = html.escape(noise.note_of(result))
    return f'<p class="wrong">{told}</p>\n' if told else ""


def _in_brackets(text: str) -> str:
    return f" ({text})" if text else ""


def _facts(result: dict[str, Any]) -> str:
    told = {name: value for name, value in result.items() if isinstance(value, str)}
    timed = {bar.name for row in result["results"] if not trouble_of(row) for bar in bars_of(row)}
    peers = {name: version for name, version in result.get("peers", {}).items() if name in timed}
    told.update({f"peer {name}": version or "found" for name, version in peers.items()})
    cells = "".join(f"<tr><th>{html.escape(n)}</th><td>{html.escape(v)}</td></tr>" for n, v in told.items())
    return f"<details><summary>Versions and machine</summary><table>{cells}</table></details>"


def _section(model: str, rows: list[dict[str, Any]], result: dict[str, Any]) -> str:
    first = rows[0]
    size = ""
    if "tensors" in first:
        size = (
            f" <small>{first['tensors']:,} tensors, {first['parameters'] / 1e6:,.1f} million parameters</small>"
        )
    head = f'<h2 id="{html.escape(model)}">{html.escape(model)}{size}</h2>'
    return head + "".join("".join(_figure(row, result)) for row in rows)


def _figure(row: dict[str, Any], result: dict[str, Any]) -> Iterator[str]:
    yield f"<figure><figcaption>{html.escape(title_of(row))}</figcaption>"
    if trouble_of(row):
        yield f'<p class="wrong">{html.escape(trouble_of(row))}</p></figure>'
        return
    scale = scale_of(row)
    limit = f"{100 * row['limit'] / scale:.2f}%" if "limit" in row else "-1%"
    for i, bar in enumerate(bars_of(row)):
        device, wall = (f"{min(100.0, 100 * ms / scale):.2f}%" for ms in (bar.device, bar.wall))
        cut = " cut" if bar.device > scale else ""
        share = f"{100 * row['limit'] / bar.device:.0f} % of the limit" if "limit" in row else ""
        others = f"host {milliseconds(bar.host)}, in a row {milliseconds(bar.wall)}"
        others = "" if "threads" in result else others
        memory = "" if bar.memory is None else f"{size_of(bar.memory)} of memory"
        ratio = f"{bar.device / row['ours']['device']:.2f} times ours" if i else ""
        spread = f"± {bar.spread}" if bar.spread else ""
        told = ", ".join(filter(None, (ratio, spread, share, others, memory, bar.note)))
        yield f"""<div class="row{" ours" if i == 0 else ""}"><span class="name">{html.escape(bar.name)}</span>
<span class="track"><i class="wall" style="width:{wall}"></i><i class="bar{cut}" style="width:{device}"></i>
<i class="limit" style="left:{limit}"></i></span><span class="ms">{milliseconds(bar.device)}</span>
<span class="told">{html.escape(told)}</span></div>"""
    left_out = "; ".join(f"{name}: {why}" for name, why in left_out_of(row).items())
    yield f"<p class='told'>left out: {html.escape(left_out)}</p></figure>" if left_out else "</figure>"
