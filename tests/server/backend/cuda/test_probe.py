from dataclasses import replace

import numpy as np
import torch

from llmservice_server.backend.agreement import Case
from llmservice_server.backend.base import Attention, KVCacheShape, StepInput
from llmservice_server.backend.cuda.attention import TritonAttention
from llmservice_server.backend.cuda.probe import what_is_wrong, why_triton_is_unusable
from llmservice_server.backend.torch.attention import TorchAttention, TorchStep

CPU = torch.device("cpu")
SHAPE = KVCacheShape(4, 2, 64, (None,), 16, torch.float32)
CASE = Case(SHAPE, torch.float32, ((5, 1), (0, 3)))


class ForgetsAToken(TorchAttention):
    def prepare(self, step: StepInput) -> TorchStep:
        return super().prepare(replace(step, starts=np.maximum(step.starts - 1, 0)))


def test_kernels_that_agree_are_usable() -> None:
    assert why_triton_is_unusable(SHAPE, torch.float32, CPU) is None
    assert what_is_wrong([CASE], TritonAttention, CPU) is None


def test_a_backend_that_answers_wrongly_is_not() -> None:
    case = Case(SHAPE, torch.float32, ((30, 1),))
    problem = what_is_wrong([case], ForgetsAToken, CPU)
    assert problem is not None
    assert problem.startswith("its answers are off by")


def test_nor_is_one_that_answers_nan() -> None:
    def unfilled(shape: KVCacheShape, num_blocks: int, device: torch.device) -> Attention:
        class Unfilled(TorchAttention):
            def prepare(self, step):  # type: ignore[no-untyped-def]
                return lambda layer, query, key_value: torch.full((len(query), 256), torch.nan)

        return Unfilled(shape, num_blocks, device)

    assert (
        what_is_wrong([CASE], unfilled, CPU) == "its answers are off by nan, at most 1e-05 is right for torch.float32"
    )


def test_nor_one_that_raises() -> None:
    def broken(*_: object) -> Attention:
        raise RuntimeError("no kernel image is available for this device\nand more")

    assert what_is_wrong([CASE], broken, CPU) == "RuntimeError: no kernel image is available for this device"


def test_heads_that_no_tile_holds_are_told_before() -> None:
    shape = KVCacheShape(4, 2, 512, (None,), 16, torch.float32)
    assert "head dimensions up to 256" in (why_triton_is_unusable(shape, torch.float32, CPU) or "")
