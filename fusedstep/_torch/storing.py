"""How an optimizer stores states and masters, as its user says it."""

from __future__ import annotations

from typing import Any, ClassVar

from .._algorithm.program import Rule
from .._memory.convert import state_names
from .._memory.storage import Storage
from .arguments import ROUNDINGS, as_master, as_rounding, as_state_dtype


class Storing:
    """What the constructor was told of it, as attributes. States that are there stay as they are."""

    storage: Storage
    rules: ClassVar[tuple[Rule, ...]]

    @property
    def state_dtype(self) -> Any:
        """The dtype of states, or those of some by name, as understood; a group may have its own.

        >>> import torch, fusedstep
        >>> p = torch.nn.Parameter(torch.ones(64, 64))
        >>> fusedstep.AdamW([p], state_dtype={"exp_avg": "int8"}).state_dtype
        {'exp_avg': torch.int8}
        """
        dtypes = self.storage.state_dtype
        return dict(dtypes) if isinstance(dtypes, tuple) else dtypes

    @state_dtype.setter
    def state_dtype(self, value: Any) -> None:
        self.storage = self.storage._replace(state_dtype=_hashable(self.understood_dtypes(value)))

    @property
    def master(self) -> str | None:
        """How masters are kept, or None; a group may have its own."""
        return self.storage.master

    @master.setter
    def master(self, value: str | None) -> None:
        self.storage = self.storage._replace(master=as_master(value))

    @property
    def rounding(self) -> str:
        """`"nearest"` or `"stochastic"`."""
        return ROUNDINGS[self.storage.draws]

    @rounding.setter
    def rounding(self, value: str) -> None:
        self.storage = self.storage._replace(draws=ROUNDINGS.index(as_rounding(value)) == 1)

    def understood_dtypes(self, state_dtype: Any) -> Any:
        return as_state_dtype(state_dtype, state_names(self.rules)[:-1])

    def storage_of(self, group: dict[str, Any]) -> Storage:
        storage = self.storage
        if "state_dtype" in group:
            chosen = self.understood_dtypes(group["state_dtype"])
            if isinstance(chosen, dict):
                # states that it does not name are stored as everywhere
                named = {name: storage.dtype_of(name) for name in state_names(self.rules)}
                chosen = {name: dtype for name, dtype in named.items() if dtype is not None} | chosen
            storage = storage._replace(state_dtype=_hashable(chosen), is_groups_own=True)
        if "master" in group:
            storage = storage._replace(master=as_master(group["master"]))
        return storage


def _hashable(dtypes: Any) -> Any:
    return tuple(dtypes.items()) if isinstance(dtypes, dict) else dtypes
