"""The fit finds the coefficients that the samples were made with, also from noisy and interrupted steps."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from llmservice_bench.calibration.fit import Sample, TooFewSamplesError, fit, nnls, predicted
from llmservice_planner.sizing.latency import LatencyModel, StepBatch, attention_pairs

H100_8B = LatencyModel(5.2e-4, 1.3e-6, 5.27e-3, 1.77e-5, 4.6e-8, 1.06e-9)
CPU_125M = LatencyModel(4e-3, 1.1e-3, 1.2e-2, 2.6e-4, 2e-6, 1.7e-7, mixed_s=8e-3)
EXPERTS = replace(H100_8B, expert_share=0.9, expert_idle=1 - 8 / 128)
WINDOWS = replace(H100_8B, window_share=0.8, window_tokens=512)
REQUEST_S = 3e-3


def _samples(model: LatencyModel, noise: float = 0.0, seed: int = 0) -> list[Sample]:
    rng = np.random.default_rng(seed)
    sizes = [1, 2, 4, 8, 16, 32, 64, 256, 512]
    contexts = (64, 500, 2000)
    decode = [("decode", StepBatch(n, n * context), 0) for n, context in itertools.product(sizes, contexts)]
    lengths = (16, 64, 256, 512, 1024, 2048, 4096)
    prefill = [("prefill", StepBatch(0, 0, n, 1, attention_pairs(0, n)), 1) for n in lengths]
    mixed = [("mixed", StepBatch(16, 16 * 300, n, 1, attention_pairs(0, n)), 0) for n in (128, 512)]
    samples = []
    for kind, batch, requests in decode + prefill + mixed:
        sample = Sample(kind, (batch,), 1.0, requests, phase=str(batch))  # type: ignore[arg-type]
        seconds = predicted(model, REQUEST_S, sample) * (1 + noise * rng.standard_normal())
        samples.append(replace(sample, seconds=seconds))
    return samples


@pytest.mark.slow
@pytest.mark.parametrize("model", [H100_8B, CPU_125M, EXPERTS, WINDOWS], ids=["H100", "CPU", "experts", "windows"])
def test_known_coefficients_are_recovered(model: LatencyModel) -> None:
    known = replace(LatencyModel(0, 0, 0, 0, 0, 0), **{
        name: getattr(model, name) for name in ("expert_share", "expert_idle", "window_share", "window_tokens")
    })  # fmt: skip
    found = fit(_samples(model), known)
    assert found.request_s == pytest.approx(REQUEST_S, rel=0.02)
    for name, expected in model.to_dict().items():
        if name != "sequence_s":  # a thousandth of an H100's step
            assert getattr(found.model, name) == pytest.approx(expected, rel=0.02, abs=1e-5 if not expected else 0), (
                name
            )
    assert max(errors.p90 for errors in (*found.errors.values(), *found.held_out.values())) < 0.02


@pytest.mark.slow
def test_interrupted_steps_do_not_move_the_fit() -> None:
    samples = _samples(CPU_125M, noise=0.01)
    for index in (3, 11, 20):
        samples[index] = replace(samples[index], seconds=3 * samples[index].seconds)
    found = fit(samples, LatencyModel(0, 0, 0, 0, 0, 0))
    clean = _samples(CPU_125M)
    errors = [abs(predicted(found.model, found.request_s, sample) / sample.seconds - 1) for sample in clean]
    assert np.median(errors) < 0.02
    assert found.errors["decode"].median < 0.03
    assert found.held_out["decode"].p90 > 0.03, "the error of an interrupted step is reported"


@pytest.mark.slow
def test_a_phase_that_the_model_cannot_explain_shows_in_the_held_out_error() -> None:
    samples = _samples(H100_8B)
    samples = [replace(s, seconds=2 * s.seconds) if s.kind == "mixed" else s for s in samples]
    found = fit(samples, LatencyModel(0, 0, 0, 0, 0, 0))
    assert found.held_out["mixed"].median > 0.25
    assert found.held_out["decode"].median < 0.05


def test_too_few_compositions_are_refused() -> None:
    with pytest.raises(TooFewSamplesError, match="3 different compositions of steps were measured, at least 8"):
        fit(_samples(H100_8B)[:3], LatencyModel(0, 0, 0, 0, 0, 0))


matrices = arrays(np.float64, (12, 4), elements=st.floats(0, 10, width=32))
targets = arrays(np.float64, 12, elements=st.floats(-10, 10, width=32))


@given(matrices, targets, st.none() | arrays(np.float64, 4, elements=st.floats(0, 10, width=32)))
def test_nnls_meets_the_optimality_conditions(matrix: np.ndarray, target: np.ndarray, start: np.ndarray | None) -> None:
    x = nnls(matrix, target, start)
    gradient = matrix.T @ (matrix @ x - target)
    scale = 1 + np.abs(matrix).max() ** 2 * (1 + np.abs(target).max())
    assert (x >= 0).all()
    assert (gradient >= -1e-6 * scale).all()
    assert abs(gradient @ x) <= 1e-5 * scale * (1 + x.max())
