"""A GPU's place is taken by torch's `meta` device, which computes shapes only: no number can be read from it.

So what runs on it asks the device for nothing. What is left to see is how the host's numbers get there: only copies
that are marked as not blocking let the host go on.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

META = torch.device("meta")
_COPY, _COPY_INTO = torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default
_MAKING = (torch.tensor, torch.as_tensor)
_INDEXING = (torch.Tensor.__getitem__, torch.Tensor.__setitem__)


class WouldWaitError(AssertionError):
    pass


@contextmanager
def never_waiting() -> Iterator[None]:
    """Raises WouldWaitError where numbers of the host go to META in a way that would keep it waiting for a GPU."""
    with _Calls(), _Operators():
        yield


class _Operators(TorchDispatchMode):
    """Sees which tensors meet: those of the host may meet the device's in copies that do not block, nowhere else."""

    def __torch_dispatch__(
        self, operator: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        devices = {leaf.device for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor) and leaf.dim() > 0}
        if operator is _COPY and kwargs.get("device") is not None:
            devices.add(kwargs["device"])
        non_blocking = kwargs.get("non_blocking", False) or (operator is _COPY_INTO and len(args) > 2 and args[2])
        if len(devices) > 1 and not (non_blocking and operator in (_COPY, _COPY_INTO)):
            raise WouldWaitError(f"{operator} takes numbers of the host, and keeps it waiting for them to arrive")
        return operator(*args, **kwargs)


class _Calls(TorchFunctionMode):
    """Sees lists of Python's, of which torch makes tensors before any operator is called."""

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        makes = function in _MAKING and torch.device(kwargs.get("device") or "cpu") == META
        indexes = function in _INDEXING and args[0].device == META and _has_list(args[1])
        if makes or indexes:
            raise WouldWaitError(f"{function.__name__} takes a list, whose copy keeps the host waiting")
        return function(*args, **kwargs)


def _has_list(index: Any) -> bool:
    return any(isinstance(part, list) for part in (index if isinstance(index, tuple) else (index,)))
