"""`fusedstep`, or `python -m fusedstep.cli`."""

from __future__ import annotations

try:
    import typer
except ImportError as error:
    raise SystemExit("the command line needs its extras: pip install 'fusedstep[cli]'") from error

from .bench import bench
from .check import check
from .demo import demo
from .doctor import doctor
from .memory import memory

app = typer.Typer(help="Fused optimizers for PyTorch.", no_args_is_help=True, add_completion=False)
app.command()(demo)
app.command()(bench)
app.command()(memory)
app.command()(check)
app.command()(doctor)

if __name__ == "__main__":
    app()
