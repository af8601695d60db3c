"""Names for ms-swift's `--optimizer`: `fused_adamw` and so on, registered when this is imported.

`--external_plugins` takes a file: one that holds `import fusedstep.integrations.ms_swift`.
"""

from __future__ import annotations

from typing import Any

from swift.optimizers import OptimizerCallback, optimizers_map

from .hugging_face import names, optimizer_cls_and_kwargs


class FusedCallback(OptimizerCallback):
    """Makes the optimizer that `--optimizer` names, with the groups of Hugging Face's Trainer.

    >>> optimizers_map["fused_adamw"] is FusedCallback
    True
    """

    def create_optimizer(self, model: Any = None) -> Any:
        # `--optim_args` holds the options
        self.trainer.optimizer_cls_and_kwargs = optimizer_cls_and_kwargs(self.args, self.args.optimizer)
        return super().create_optimizer(model)


optimizers_map.update(dict.fromkeys(names(), FusedCallback))
