"""A plugin for axolotl, which knows no optimizers of other packages by name.

plugins: [fusedstep.integrations.axolotl.Plugin]
fusedstep: {name: adamw, state_dtype: int8}
"""

from __future__ import annotations

from typing import Any

from axolotl.integrations.base import BasePlugin
from pydantic import BaseModel

from .hugging_face import optimizer_cls_and_kwargs


class FusedstepArgs(BaseModel):
    """Our entry of a configuration file: `name`, and options of that optimizer.

    >>> FusedstepArgs(fusedstep={"name": "lion"}).fusedstep
    {'name': 'lion'}
    """

    fusedstep: dict[str, Any] | None = None


class Plugin(BasePlugin):
    """Has axolotl train with one of our optimizers: AdamW, or the one in `fusedstep: {name: ...}`.

    Learning rate, betas, eps and weight decay are axolotl's own entries. `max_grad_norm` is too, and clipping
    moves into the step (see `fusedstep.integrations.hugging_face.optimizer_cls_and_kwargs`). `optimizer` is
    ignored.

    >>> Plugin().get_input_args()
    'fusedstep.integrations.axolotl.FusedstepArgs'
    """

    def get_input_args(self) -> str:
        return f"{__name__}.{FusedstepArgs.__name__}"

    def post_trainer_create(self, cfg: Any, trainer: Any) -> None:
        # the trainer makes its optimizer later, when it knows how many steps there are
        trainer.optimizer_cls_and_kwargs = optimizer_cls_and_kwargs(
            trainer.args, **dict(cfg.get("fusedstep") or {})
        )
