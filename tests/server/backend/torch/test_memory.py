import mmap
from pathlib import Path

import pytest

from llmservice_server.backend.torch.memory import available_cpu_bytes, peak_growth_bytes

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
