"""What the interpreter cannot show: that every kernel compiles for a GPU, and the resources that it takes."""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

HARNESS = Path(__file__).parents[5] / "e2e"
SHARED_BYTES = {80: 163 * 1024, 89: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024}
"""That a program may have: CUDA C++ Programming Guide, technical specifications by compute capability."""
PREFILL_CORES = {80: "mma", 89: "mma", 90: "wgmma", 100: "tcgen05"}
PRODUCTS = {"_product"}
ONE_TOKEN = {"_gate_up", "_down"}
ROUTING = {"_route", "_count", "_plan", "_place_all"}
SAMPLING = {"_add_to_histograms": 2, "_count_equal": 2, "_mask": 1, "_sum_tiles": 1, "_find": 1}
"""How many kernels are compiled: by number and by mass, and the same for any number of rows."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("capability", "shapes"),
    [(90, "one"), *(pytest.param(each, "usual", marks=pytest.mark.soak) for each in SHARED_BYTES)],
)
def test_every_kernel_compiles_and_keeps_to_its_registers(capability: int, shapes: str, tmp_path: Path) -> None:
    """In a process of its own: this one has Triton as an interpreter."""
    environment = os.environ | {"PYTHONPATH": str(HARNESS), "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "harness.gpu.compile_kernels", str(capability), shapes, "--json"]
    output = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
    kernels = [json.loads(line) for line in output.splitlines()]
    assert {kernel["kernel"] for kernel in kernels} == {
        "_store", "_rotate_and_store", "_decode", "_combine", "_prefill", "_add_rms_norm", "_silu_mul",
        *PRODUCTS, "_add_parts", "_dequantize", "_combine_experts", *ONE_TOKEN, *ROUTING, *SAMPLING,
        *(["_round_rows"] if capability >= 89 else []),
    }  # fmt: skip
    counts = Counter(kernel["kernel"] for kernel in kernels)
    assert {name: counts[name] for name in SAMPLING} == SAMPLING
    for kernel in kernels:
        assert kernel["loop_spills"] == 0, kernel  # beside the loop a few numbers may wait on the stack
        assert kernel["stack_bytes"] <= 128, kernel
        assert kernel["shared_bytes"] <= SHARED_BYTES[capability], kernel
        if kernel["kernel"] in PRODUCTS:
            assert kernel["copy_bytes"] == 16, kernel  # weights are copied; scales and tiles are loaded one by one
            assert kernel["tensor_cores"], kernel
            continue
        if kernel["kernel"] in ROUTING:
            continue
        assert kernel["load_bytes"] >= (8 if kernel["kernel"] in {"_combine_experts", "_down"} else 16), kernel
        if kernel["kernel"] in {"_decode", "_prefill"}:
            assert kernel["copy_bytes"] == 16, kernel
            assert kernel["tensor_cores"] == (PREFILL_CORES[capability] if kernel["kernel"] == "_prefill" else "mma")
