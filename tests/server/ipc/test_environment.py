"""The environment of a process that computes, before torch is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from llmservice_server.ipc.environment import for_computing

pytestmark = pytest.mark.slow

ASK = """
import os, sys, llmservice_server
assert "torch" not in sys.modules
llmservice_server.LLM
import torch
kept = torch.zeros(16 << 20)
pages = [line for line in open("/proc/self/smaps_rollup") if line.startswith("AnonHugePages")]
print(os.environ["THP_MEM_ALLOC_ENABLE"], pages[0].split()[1])
"""


def huge_pages(environment: dict[str, str]) -> tuple[str, int]:
    """The variable after `LLM` is imported, and the KiB in huge pages with a tensor of 64 MiB."""
    run = subprocess.run(
        [sys.executable, "-c", ASK],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    variable, kib = run.stdout.split()
    return variable, int(kib)


def kernel_has_huge_pages() -> bool:
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    return setting.exists() and "[never]" not in setting.read_text()


@pytest.mark.skipif(not kernel_has_huge_pages(), reason="this kernel has huge pages disabled")
def test_large_tensors_lie_in_huge_pages() -> None:
    variable, kib = huge_pages({})
    assert variable == "1"
    assert kib > 32 << 10


def test_a_setting_of_the_caller_takes_precedence() -> None:
    assert huge_pages({"THP_MEM_ALLOC_ENABLE": "0"})[0] == "0"


def test_the_allocator_grows_its_segments_and_threads_wait_a_little() -> None:
    environment = for_computing({"PATH": "/bin", "GOMP_SPINCOUNT": "7"})
    assert environment["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    assert environment["OMP_WAIT_POLICY"] == "PASSIVE"
    assert (environment["PATH"], environment["GOMP_SPINCOUNT"]) == ("/bin", "7")


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"])
def test_a_users_own_allocator_is_left_alone(name: str) -> None:
    environment = for_computing({name: "max_split_size_mb:64"})
    assert {key: value for key, value in environment.items() if "ALLOC_CONF" in key} == {name: "max_split_size_mb:64"}
