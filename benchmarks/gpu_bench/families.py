"""Every model family on the GPU: the tokens of small random checkpoints, compared with transformers on the CPU."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from gpu_bench.bench import Bench
from gpu_bench.sections import Findings
from llmservice_bench.results import Check
from llmservice_server.backend import choice
from llmservice_server.backend.cuda.kernels.jit import INTERPRETED
from llmservice_server.engine.config import EngineConfig, Implementation
from llmservice_server.engine.engine import Engine
from llmservice_server.runtime.startup import load_engine, model_runner
from llmservice_server.types.messages import GenerateRequest, SamplingParams

_CASES_PER_PROCESS = 4
"""So that a lost CUDA context takes few others with it."""
_MOST_PROCESSES = 12


@dataclass(frozen=True, slots=True)
class Case:
    """A family of `harness.families`, as it is served."""

    name: str
    implementation: Implementation
    dtype: Literal["float32", "bfloat16"]
    settings: Mapping[str, Any]
    """Of the device."""
    prompts: tuple[int, ...]  # tokens
    output_tokens: int


def families(bench: Bench) -> Findings:
    """Each family in float32, whose tokens must be those of transformers; those with a model of our own in bfloat16."""
    from harness.families import FAMILIES, OTHERS

    ways: list[tuple[str, Implementation]] = [(name, "own") for name in FAMILIES]
    ways += [(name, "transformers") for name in OTHERS]
    sizes = bench.sizes
    ways = ways[: sizes.num_families]
    settings = {**bench.gpu.settings, "max_num_batched_tokens": min(64, sizes.max_num_batched_tokens)}
    others = settings, sizes.family_prompts, sizes.family_tokens
    cases = [Case(name, code, "float32", *others) for name, code in ways]
    cases += [Case(name, code, "bfloat16", *others) for name, code in ways if code == "own"]
    bench.clear()
    processes = min(_MOST_PROCESSES, os.cpu_count() or 1, -(-len(cases) // _CASES_PER_PROCESS))
    spawn = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(processes, mp_context=spawn, max_tasks_per_child=_CASES_PER_PROCESS)
    begun = [pool.submit(_row, case) for case in cases]
    done, _ = wait(begun, sizes.families_s)
    rows = [each.result() for each in begun if each in done and each.exception() is None]  # a process may have died
    pool.shutdown(wait=False, cancel_futures=True)
    for child in multiprocessing.active_children():
        child.kill()  # whatever it computes
    return Findings(
        rows=rows,
        checks=[
            Check("families computed in time", f"= {len(cases)}", len(rows)),
            Check("families that fail", "= 0", sum("error" in row for row in rows)),
            Check(
                "families whose float32 tokens differ from transformers'",
                "= 0",
                sum(row["dtype"] == "float32" and row.get("different tokens", 1) > 0 for row in rows),
            ),
            Check("families that need a fallback", "= 0", sum(bool(row.get("fallbacks")) for row in rows)),
        ],
    )


def _row(case: Case) -> dict[str, Any]:
    started_s = time.perf_counter()
    row = {"part": "family", "family": case.name, "code": case.implementation, "dtype": case.dtype}
    try:
        with tempfile.TemporaryDirectory() as folder:
            row |= _compared(case, Path(folder))
    except Exception as error:  # the other families must run nevertheless
        row["error"] = f"{type(error).__name__}: {error}"[:500]
    return row | {"s": time.perf_counter() - started_s}


def _compared(case: Case, folder: Path) -> dict[str, Any]:
    from harness.families import FAMILIES, OTHERS, SMALL, save

    if INTERPRETED:
        import harness.triton_interpreter  # noqa: F401 - twice as fast as Triton's own

    torch.set_num_threads(1)
    choice.in_child = _here  # another process would import torch for each case
    reference = save((FAMILIES | OTHERS)[case.name], folder)
    reference.set_attn_implementation("eager")  # sdpa ignores the bounds of scores
    config = EngineConfig(
        model=folder,
        implementation=case.implementation,
        dtype=case.dtype,
        max_num_seqs=8,
        max_model_len=256,
        prefill_chunk_tokens=19,
        **{**case.settings, "kv_cache_memory_bytes": 64 << 20},
    )
    engine = load_engine(config)
    prompts = {str(length): _prompt(length, SMALL["vocab_size"]) for length in case.prompts}
    answers, different = _serve(engine, prompts, case.output_tokens), 0
    for name, prompt in prompts.items():
        answer = answers[name]
        with torch.inference_mode():
            logits = reference(torch.tensor([prompt + answer[:-1]]), use_cache=False).logits[0]
        chosen = logits.argmax(dim=-1)[len(prompt) - 1 :].tolist()
        different += sum(one != other for one, other in zip(chosen, answer, strict=True))
    runner = model_runner(engine)
    return {
        "different tokens": different,
        "attention": type(runner.attention).__name__,
        "graphs": runner.decode_path is not None,
        "fallbacks": "; ".join(f"{part}: {why}" for part, why in engine.ready.fallbacks.items()),
    }


def _here(work: Callable[..., Any], *arguments: Any, **settings: Any) -> Any:
    return work(*arguments, **settings)


def _prompt(length: int, vocab_size: int) -> list[int]:
    generator = torch.Generator().manual_seed(length)
    return torch.randint(vocab_size, (length,), generator=generator).tolist()


def _serve(engine: Engine, prompts: Mapping[str, list[int]], output_tokens: int) -> dict[str, list[int]]:
    sampling = SamplingParams(max_tokens=output_tokens, temperature=0.0, ignore_eos=True)
    for name, prompt in prompts.items():
        engine.add(GenerateRequest(request_id=name, prompt_token_ids=prompt, sampling=sampling, arrival_s=0.0))
    answers: dict[str, list[int]] = defaultdict(list)
    while engine.has_work:
        for output in engine.step().outputs:
            if output.error is not None:
                raise RuntimeError(f"request {output.request_id}: {output.error}")
            answers[output.request_id] += output.token_ids
    return answers
