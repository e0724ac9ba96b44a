import os
import signal

import pytest
import torch

from llmservice_server.backend import choice
from llmservice_server.backend.cache_shape import KVCacheShape
from llmservice_server.backend.choice import choose_backend, decide, in_child
from llmservice_server.types.errors import ConfigError

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("wanted", "device", "problem", "name", "reason"),
    [
        ("auto", "cpu", None, "cpu", "fastest"),
        ("auto", "cuda", None, "triton", "agreed with torch"),
        ("auto", "cuda", "it raised ValueError", "torch", "it raised ValueError"),
        ("torch", "cpu", None, "torch", "requested"),
        ("torch", "cuda", None, "torch", "requested"),
        ("triton", "cuda", None, "triton", "requested"),
    ],
)
def test_the_choice_says_why(wanted: str, device: str, problem: str | None, name: str, reason: str) -> None:
    chosen, why = decide(wanted, device, problem)  # type: ignore[arg-type]
    assert chosen == name
    assert reason in why


def test_a_requested_backend_that_is_unusable_is_refused_with_a_remedy() -> None:
    with pytest.raises(ConfigError, match="no CUDA device: use --attention auto"):
        decide("triton", "cpu", "there is no CUDA device")


@pytest.mark.parametrize("wanted", ["auto", "torch"])
def test_an_fp8_cache_is_for_our_gpu_kernels_only(wanted: str) -> None:
    shape = KVCacheShape(4, 2, 64, (None,), 16, torch.float8_e4m3fn)
    with pytest.raises(ConfigError, match="choose another --kv-cache-dtype"):
        choose_backend(wanted, shape, torch.float32, CPU, max_num_batched_tokens=64)  # type: ignore[arg-type]
    assert choose_backend("triton", shape, torch.float32, CPU, max_num_batched_tokens=64).name == "triton"


@pytest.mark.slow
def test_a_check_runs_in_a_process_of_its_own() -> None:
    assert in_child(os.getpid) != os.getpid()
    with pytest.raises(ZeroDivisionError):
        in_child(divmod, 1, 0)


@pytest.mark.slow
def test_a_check_that_kills_its_process_counts_as_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    in_a_child = choice.in_child
    monkeypatch.setattr(choice, "in_child", lambda *_: in_a_child(signal.raise_signal, signal.SIGKILL))
    shape, gpu = KVCacheShape(4, 2, 64, (None,), 16, torch.float32), torch.device("cuda")
    problem = "the process that checked its kernels was killed"
    backend = choose_backend("auto", shape, torch.float32, gpu, max_num_batched_tokens=64)
    assert (backend.name, backend.fallbacks) == ("torch", {"attention": problem})
    with pytest.raises(ConfigError, match=f"{problem}: use --attention auto"):
        choose_backend("triton", shape, torch.float32, gpu, max_num_batched_tokens=64)
