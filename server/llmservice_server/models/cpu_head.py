"""A model's head on a CPU: the last norm and the product with the vocabulary's matrix, compiled as one."""

from __future__ import annotations

from typing import Any

import numpy as np

from llmservice_server.cpu.compiled import compiled, compiled_inner
from llmservice_server.cpu.element import widened
from llmservice_server.cpu.panel_product import PANEL, multiply_into
from llmservice_server.cpu.parallel import for_each
from llmservice_server.models.cpu_layer_ops import norm


@compiled(nogil=True)
def multiply_norms(hidden: Any, weight: Any, eps: Any, panels: Any, bias: Any, product: Any) -> None:
    """`norm(hidden) @ panels + bias` into `product`, float32, rounded as the elements of `hidden` are.

    hidden: an array of `as_array`, `[num_rows, in]`. weight: the norm's. panels and bias: those of `multiply`.
    """
    normed = np.empty_like(hidden)
    norm(hidden, weight, eps, normed)
    for_each(_multiply_panel, len(panels), (normed.view(panels.dtype), panels, bias, normed, product))


@compiled_inner()
def _multiply_panel(number: int, lanes: Any, panels: Any, bias: Any, like: Any, product: Any) -> None:
    first = number * PANEL
    sums, rounded = np.empty((len(lanes), PANEL), np.float32), np.empty((len(lanes), PANEL), like.dtype)
    multiply_into(lanes, panels[number], bias[first : first + PANEL], sums, rounded)
    for row in range(len(lanes)):
        for index in range(PANEL):
            product[row, first + index] = widened(rounded[row, index])
