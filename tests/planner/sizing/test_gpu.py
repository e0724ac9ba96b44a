"""The catalogue: found under any of a GPU's names, and consistent with itself."""

from __future__ import annotations

import pytest

from llmservice_planner.sizing.gpu import GIB, GPU, GPUS, UnknownGPU, find_gpu


@pytest.mark.parametrize(
    ("name", "gpu"),
    [
        ("h100-80gb", "h100-80gb"),
        ("H100_80GB", "h100-80gb"),
        ("h100", "h100-80gb"),
        ("NVIDIA-H100-80GB-HBM3", "h100-80gb"),  # as the node's label says it
        ("Tesla-T4", "t4"),
        ("NVIDIA A10G", "a10g"),
        ("AMD_Instinct_MI300X_OAM", "mi300x-192gb"),
    ],
)
def test_a_gpu_is_found_under_its_names(name: str, gpu: str) -> None:
    assert find_gpu(name).name == gpu


def test_an_unknown_gpu_is_answered_with_close_ones() -> None:
    with pytest.raises(UnknownGPU, match=r"'h100-81gb' is not in the catalogue: did you mean h100-80gb or .*known are"):
        find_gpu("h100-81gb")


def test_a_name_like_nothing_is_answered_with_the_catalogue() -> None:
    with pytest.raises(UnknownGPU, match=r"'' is not in the catalogue: known are v100-16gb, "):
        find_gpu("")


@pytest.mark.parametrize("gpu", GPUS.values(), ids=GPUS)
def test_usable_memory_is_less_than_nominal(gpu: GPU) -> None:
    boxed = {"t4": 16, "a10": 24, "a10g": 24, "l4": 24, "rtx-4090": 24, "l40s": 48, "h100-nvl": 94}
    size = boxed.get(gpu.name) or int(next(part for part in gpu.name.split("-") if part.endswith("gb"))[:-2])
    assert 0.88 * size * GIB < gpu.memory_bytes < size * GIB


@pytest.mark.parametrize("gpu", GPUS.values(), ids=GPUS)
def test_a_gpu_tells_its_rates_its_source_and_its_label(gpu: GPU) -> None:
    assert gpu.bandwidth_bytes_per_s is not None
    assert gpu.flops_16bit is not None
    assert gpu.flops_fp8 is None or gpu.flops_fp8 > gpu.flops_16bit
    assert gpu.source
    assert gpu.node_labels


def test_labels_name_one_gpu_each() -> None:
    labels = [label for gpu in GPUS.values() for label in gpu.node_labels]
    assert len(labels) == len(set(labels))
