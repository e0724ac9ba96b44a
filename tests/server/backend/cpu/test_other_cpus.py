"""The kernels for CPUs without AVX-512, where the suite runs on a CPU that has it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from llvmlite.binding import get_host_cpu_features

from llmservice_bench.report import AVX2_ONLY


@pytest.mark.slow
@pytest.mark.skipif(not get_host_cpu_features().get("avx512f"), reason="the tests themselves run on such a CPU here")
@pytest.mark.timeout(600)  # compiles for a minute of CPU time, of which other workers leave it a fraction
def test_products_and_decode_steps_agree_with_torch_on_a_cpu_with_avx2_only() -> None:
    here = Path(__file__).parent
    chosen = ["-k", "(kernel or states_agree or logits_agree) and not qwen and not biases and not 4_bit"]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *chosen]
    run = subprocess.run(
        [*command, *(here / f"test_{name}.py" for name in ("linear", "decode", "experts", "int4"))],
        env={**os.environ, **AVX2_ONLY},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-4000:]
    assert " passed" in run.stdout
