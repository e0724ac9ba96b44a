"""What of a CUDA card is arithmetic, and what it asks of torch; a double answers for torch, as there is no card."""

import warnings
from collections.abc import Callable

import pytest
import torch

import harness.triton_interpreter  # noqa: F401 - what is imported here is not compiled
from card.card import seconds
from card.cuda_card import CudaCard

GIB = 1 << 30


class Cuda:
    """A card that has done `now_s` seconds of work; `asked` of it, in turn."""

    def __init__(self) -> None:
        self.now_s, self.free, self.name = 0.0, 3 << 20, "NVIDIA H200"
        self.asked: list[str] = []

    def noting(self, what: str) -> Callable[..., None]:
        return lambda *arguments: self.asked.append(" ".join([what, *map(str, arguments)]))

    def event(self, enable_timing: bool) -> "Event":
        assert enable_timing
        return Event(self)


class Event:
    def __init__(self, cuda: Cuda) -> None:
        self.cuda, self.at_s = cuda, 0.0

    def record(self) -> None:
        self.at_s = self.cuda.now_s

    def synchronize(self) -> None:
        self.cuda.asked.append("wait")

    def elapsed_time(self, later: "Event") -> float:
        return (later.at_s - self.at_s) * 1e3


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    double = Cuda()
    for name, stands_in in {
        "get_device_name": lambda: double.name,
        "mem_get_info": lambda: (double.free, 150 * GIB),
        "Event": double.event,
        "set_sync_debug_mode": double.noting("mode"),
        "synchronize": double.noting("synchronize"),
        "empty_cache": double.noting("empty_cache"),
    }.items():
        monkeypatch.setattr(torch.cuda, name, stands_in)
    return double


def test_laps_are_queued_one_behind_the_other_and_waited_for_once(cuda: Cuda) -> None:
    takes_s = iter([9.0, 9.0, 1.0, 4.0, 2.0])

    def work() -> None:
        cuda.now_s += next(takes_s)

    assert CudaCard().laps(work, 3) == [1.0, 4.0, 2.0]  # the first two warm up
    assert cuda.asked == ["wait"]
    takes_s = iter([9.0, 9.0, 1.0, 4.0, 2.0])
    assert seconds(CudaCard(), work, 3) == 2.0


def test_waits_are_told_by_their_place_and_nothing_else_is_one(cuda: Cuda) -> None:
    def work() -> None:
        warnings.warn("called a synchronizing CUDA operation (Triggered internally at …)", UserWarning, stacklevel=1)
        warnings.warn("another matter", UserWarning, stacklevel=1)
        warnings.warn("called a synchronizing CUDA operation (Triggered internally at …)", UserWarning, stacklevel=1)

    first = work.__code__.co_firstlineno + 1
    assert CudaCard().host_waits(work) == [f"test_cuda_card.py:{first}", f"test_cuda_card.py:{first + 2}"]
    assert cuda.asked == ["mode warn", "mode default"]


def test_nobody_is_watched_any_more_after_work_that_fails(cuda: Cuda) -> None:
    with pytest.raises(ZeroDivisionError):
        CudaCard().host_waits(lambda: 1 // 0)
    assert cuda.asked == ["mode warn", "mode default"]


def test_a_crowd_takes_what_is_free_or_what_of_it_can_be_had(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    card, taken, empty = CudaCard(), list[int](), torch.empty
    card.device = torch.device("cpu")
    cuda.free = 100 << 20

    def fragmented(size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        taken.append(size)
        if size > 20 << 20:
            raise torch.OutOfMemoryError("in no one piece")
        return empty(size, dtype=dtype, device=device)

    monkeypatch.setattr(torch, "empty", fragmented)
    with card.crowded(20 << 20):
        assert taken == [80 << 20, 16 << 20]
        assert cuda.asked == ["empty_cache"]
    assert cuda.asked == ["empty_cache", "empty_cache"]


def test_a_card_that_no_catalogue_has_is_planned_with_its_own_memory(cuda: Cuda) -> None:
    assert CudaCard().for_the_plan().name == "h200-141gb"
    cuda.name = "NVIDIA Tomorrow"
    unknown = CudaCard().for_the_plan()
    assert (unknown.name, unknown.memory_bytes) == ("NVIDIA Tomorrow", 150 * GIB)
