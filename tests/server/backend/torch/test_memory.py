import ctypes
import mmap
from pathlib import Path

import pytest
import torch

from llmservice_server.backend.torch.memory import available_cpu_bytes, peak_growth_bytes, trim_heap
from llmservice_server.types.errors import OutOfMemoryError

GIB = 1 << 30


@pytest.mark.parametrize(
    ("cgroup", "expected"),
    [
        ({}, 8 * GIB),
        ({"memory.max": "max", "memory.current": str(GIB)}, 8 * GIB),
        ({"memory.max": str(4 * GIB), "memory.current": str(GIB)}, 3 * GIB),
        ({"memory.max": str(64 * GIB), "memory.current": str(GIB)}, 8 * GIB),
        ({"memory.max": str(4 * GIB)}, 4 * GIB),
        (
            {
                "memory.max": str(4 * GIB),
                "memory.current": str(3 * GIB),
                "memory.stat": f"anon {GIB}\ninactive_file {2 * GIB}\n",
            },
            3 * GIB,
        ),
        ({"memory/memory.limit_in_bytes": str(2 * GIB), "memory/memory.usage_in_bytes": "0"}, 2 * GIB),
        ({"memory/memory.limit_in_bytes": "9223372036854771712", "memory/memory.usage_in_bytes": "5"}, 8 * GIB),
    ],
)
def test_available_memory_is_the_smaller_of_machine_and_cgroup(
    tmp_path: Path, cgroup: dict[str, str], expected: int
) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text(f"MemTotal: {16 << 20} kB\nMemAvailable: {8 << 20} kB\n")
    for name, value in cgroup.items():
        path = tmp_path / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(value + "\n")
    assert available_cpu_bytes(tmp_path) == expected


def test_a_machine_that_does_not_report_its_memory_is_refused_with_the_flag_that_helps(tmp_path: Path) -> None:
    with pytest.raises(OutOfMemoryError, match=r"proc/meminfo has no line MemAvailable: set --kv-cache-memory"):
        available_cpu_bytes(tmp_path)


def test_peak_growth_includes_memory_that_is_freed() -> None:
    def work() -> None:
        with mmap.mmap(-1, 64 << 20) as pages:  # fresh ones: an allocator may have kept some from before
            for place in range(0, len(pages), mmap.PAGESIZE):
                pages[place] = 1

    grown = peak_growth_bytes(work)
    assert grown is not None
    assert 60 << 20 < grown < 80 << 20
    small = peak_growth_bytes(lambda: None)
    assert small is not None
    assert small < 8 << 20  # the peak of before counts no longer


def test_peak_growth_is_none_without_kernel_support(tmp_path: Path) -> None:
    assert peak_growth_bytes(lambda: None, tmp_path / "nowhere") is None


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="only glibc keeps what lies between blocks")
def test_freed_memory_between_blocks_in_use_is_given_back() -> None:
    def resident_mib() -> float:
        line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
        return int(line.split()[1]) / 1024

    blocks = [torch.zeros(1 << 20, dtype=torch.uint8) for _ in range(200)]
    del blocks[0]  # from now on blocks of this size are parts of the heap
    blocks += [torch.zeros(1 << 20, dtype=torch.uint8) for _ in range(200)]
    del blocks[::2]
    before = resident_mib()
    trim_heap()
    assert resident_mib() < before - 50
