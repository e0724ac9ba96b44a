"""This project's engine compared with llama.cpp and transformers: same weights, requests and cores.

Each engine runs in its own process, warmed up and without HTTP. Request lengths are those of the Azure conversation
trace, scaled to a model with 12 layers and hidden size 768; 32 requests are always in flight, and only requested tokens
count. Then single requests, for which the engines alternate; ours and the best of the others are measured more often,
so that temporary slowness of a shared machine affects both.
`--formats` compares our products of 4 bits, and of 8 where the CPU has instructions for them, with bfloat16's and with
llama.cpp's Q8_0 and Q4_K_M, and transformers' code on our cache with transformers' own (`make bench-formats`). The head
of the model of 4 bits has 8, as Q4_K_M's has more bits (6.56) than the rest.
There is a file of results for each kind of CPU, by its vector instructions; only whole runs write it.
Needs the extra `bench-peers`; llama.cpp is compiled for this machine, which takes minutes. With `--avx2` every engine
keeps to the instructions of a CPU without AVX-512, llama.cpp by another build (`make bench-avx2`).
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

from llmservice_bench.models import SHAPES, checkpoint
from llmservice_bench.report import AVX2_ONLY, Report, latency_cells, latency_titles
from llmservice_bench.results import Check, Results
from llmservice_bench.trace import Lengths, read_trace, scaled_to
from peers.process import PeerProcess
from peers.workload import Answer, Job, agreement, draw_requests, in_turns, records

OURS, LLAMA_CPP = "ours", "llama.cpp"
CONTINUOUS, STATIC = "transformers continuous", "transformers static"
CLASSES = {
    OURS: "peers.ours:peer",
    LLAMA_CPP: "peers.llama_cpp:peer",
    CONTINUOUS: "peers.transformers_peers:ContinuousPeer",
    STATIC: "peers.transformers_peers:StaticPeer",
}
REQUESTS = 96
INT8, INT4, BY_TRANSFORMERS = "ours, int8", "ours, W4A16", "ours, by transformers"
Q8_0, Q4_K_M = "llama.cpp Q8_0", "llama.cpp Q4_K_M"
FORMATS = {
    OURS: CLASSES[OURS],
    INT8: "peers.ours:int8_peer",
    INT4: "peers.ours:int4_peer",
    BY_TRANSFORMERS: "peers.ours:peer_by_transformers",
    Q8_0: "peers.llama_cpp:q8_0_peer",
    Q4_K_M: "peers.llama_cpp:q4_k_m_peer",
    CONTINUOUS: CLASSES[CONTINUOUS],
}
FORMAT_TARGETS = (
    (INT8, OURS, 1.3, 1.0),
    (INT8, Q8_0, 1.3, 1.0),
    (INT4, Q4_K_M, 1.3, 1.0),
    (BY_TRANSFORMERS, CONTINUOUS, 2.0, None),
)
"""Target ratios of the first one's useful tokens per second to the second's: with all in flight, and of one stream."""
DTYPES = ("float32", "bfloat16")
MODEL = "small"
IN_FLIGHT = 32
SINGLE, TURNS, FINAL_TURNS = Lengths(64, 64), 5, 26
"""Single requests: their number, the turns of every peer, and the additional turns of ours and the best other
peer, whose figures are close to each other."""
LONGEST = Lengths(400, 256)
TARGETS = {
    LLAMA_CPP: {"float32": 1.3, "bfloat16": 1.6},
    CONTINUOUS: dict.fromkeys(DTYPES, 3.0),
    STATIC: dict.fromkeys(DTYPES, 4.0),
}
"""Target ratio of our useful tokens per second to a peer's; with llama.cpp, our p99 TTFT must not be worse."""


@dataclass(frozen=True, slots=True)
class Shown:
    """The measurements of one peer in one dtype."""

    batch: list[Answer]
    single: list[Answer]
    """One per turn."""


def measure(peers: Mapping[str, str], batch: Job, single: Job, *, all_turns: bool) -> dict[str, Shown]:
    """Run the batch with each peer, then the single requests alternately, most of them with the `finalists` only."""
    with ExitStack() as stack:
        processes = {peer: stack.enter_context(PeerProcess(name)) for peer, name in peers.items()}
        together: dict[str, list[Answer]] = {}
        for peer, process in processes.items():
            process.load(batch)
            together[peer] = process.serve(batch.requests)
            process.load(single)
        alone: dict[str, list[Answer]] = {peer: [] for peer in peers}
        taking_turns = [*peers]
        for turn, request in enumerate(single.requests):
            if turn == TURNS and not all_turns:
                taking_turns = finalists({peer: median(speeds(single, answers)) for peer, answers in alone.items()})
            for peer in rotated(taking_turns, turn):
                alone[peer] += processes[peer].serve([request])
    return {peer: Shown(together[peer], alone[peer]) for peer in peers}


def finalists(tokens_per_s: dict[str, float]) -> list[str]:
    """Our engine and the best of the others."""
    others = [peer for peer in tokens_per_s if peer != OURS]
    return [OURS, *sorted(others, key=tokens_per_s.__getitem__)[-1:]]


def speeds(single: Job, answers: Sequence[Answer]) -> list[float]:
    """Tokens per second of each single request."""
    laid = in_turns(single.requests[: len(answers)], answers)
    return [Report.of([record]).output_tokens_per_s for record in laid]


def rotated(peers: Sequence[str], turn: int) -> list[str]:
    """All peers once, in an order that changes with each turn."""
    first = turn % len(peers)
    return [*peers[first:], *peers[:first]]


def jobs(dtype: str, count: int, in_flight: int, gguf: Path) -> tuple[Job, Job]:
    """The batched and the single requests, which are the same for every peer."""
    lengths = scaled_to(read_trace(), LONGEST)
    vocab_size = SHAPES[MODEL].vocab_size
    batch = Job(
        model=checkpoint(MODEL, dtype),
        gguf=gguf,
        dtype=dtype,
        requests=draw_requests(lengths, count, vocab_size, seed=0),
        in_flight=in_flight,
        threads=len(os.sched_getaffinity(0)),
    )
    return batch, replace(batch, requests=draw_requests([SINGLE], TURNS + FINAL_TURNS, vocab_size, seed=1), in_flight=1)


def checks(
    batches: dict[str, Report], turns: dict[str, list[float]], ttft_s: dict[str, list[float]], dtype: str
) -> list[Check]:
    """The targets for the peers that ran; `turns` are the tokens per second of each peer's single requests, and
    `ttft_s` the times to their first tokens."""
    ours = batches[OURS]
    found = []
    for peer, other in batches.items():
        if peer != OURS:
            ratio = ours.output_tokens_per_s / other.output_tokens_per_s
            what = f"{dtype}: output tokens/s at {IN_FLIGHT} in flight, ours ÷ {peer}"
            found.append(Check(what, f">= {TARGETS[peer][dtype]:g}", ratio))
    if LLAMA_CPP in batches:
        ratio = ours.ttft_s.p99 / batches[LLAMA_CPP].ttft_s.p99
        found.append(Check(f"{dtype}: p99 TTFT at {IN_FLIGHT} in flight, ours ÷ {LLAMA_CPP}", "<= 1", ratio))
        pairs = zip(ttft_s[OURS], ttft_s[LLAMA_CPP], strict=False)  # the others of `finalists` have more turns
        ratio = median(mine / theirs for mine, theirs in pairs)
        found.append(Check(f"{dtype}: TTFT of a prompt alone, ours ÷ {LLAMA_CPP}, median of turns", "<= 1", ratio))
    if len(turns) > 1:
        _, best = finalists({peer: median(of_peer[:TURNS]) for peer, of_peer in turns.items()})
        ratio = median(mine / theirs for mine, theirs in zip(turns[OURS], turns[best], strict=True))
        what = (
            f"{dtype}: output tokens/s of a single stream, ours ÷ the best, {best}, median of {len(turns[best])} turns"
        )
        found.append(Check(what, ">= 1", ratio))
    return found


def formats() -> dict[str, str]:
    """The peers of `--formats`; products of 8 bits need instructions that not every CPU has."""
    from llmservice_server.backend.cpu.linear_kernels import HAS_QUAD_PRODUCT  # which `keep_to_avx2` may change

    return {peer: name for peer, name in FORMATS.items() if peer != INT8 or HAS_QUAD_PRODUCT}


def format_checks(batches: Mapping[str, Report], turns: Mapping[str, list[float]], dtype: str) -> list[Check]:
    found = []
    for peer, other, together, alone in FORMAT_TARGETS:
        if peer not in batches:
            continue
        ratio = batches[peer].output_tokens_per_s / batches[other].output_tokens_per_s
        what = f"{dtype}: output tokens/s at {IN_FLIGHT} in flight, {peer} ÷ {other}"
        found.append(Check(what, f">= {together:g}", ratio))
        if alone is not None:
            ratio = median(mine / theirs for mine, theirs in zip(turns[peer], turns[other], strict=True))
            what = f"{dtype}: output tokens/s of a single stream, {peer} ÷ {other}, median of {len(turns[peer])} turns"
            found.append(Check(what, f">= {alone:g}", ratio))
    return found


def compare(peers: Mapping[str, str], dtype: str, count: int) -> tuple[list[dict[str, Any]], list[Check]]:
    """Rows and checks of one dtype, printed as they are measured."""
    rows: list[dict[str, Any]] = []
    batches: dict[str, Report] = {}
    turns: dict[str, list[float]] = {}
    ttft_s: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        gguf = Path(folder) / "model.gguf"
        if {LLAMA_CPP, Q8_0} & peers.keys():
            import_module("peers.gguf_file").write_gguf(checkpoint(MODEL, dtype), gguf, dtype)
        batch, single = jobs(dtype, count, IN_FLIGHT, gguf)
        shown = measure(peers, batch, single, all_turns=INT4 in peers)
    ours = shown[OURS]
    for peer, answers in shown.items():
        taken = single.requests[: len(answers.single)]
        alone = in_turns(taken, answers.single)
        batches[peer] = Report.of(records(batch.requests, answers.batch))
        turns[peer] = speeds(single, answers.single)
        ttft_s[peer] = [record.ttft_s for record in alone]
        for in_flight, report, same in (
            (IN_FLIGHT, batches[peer], agreement(batch.requests, ours.batch, answers.batch)),
            (1, Report.of(alone), agreement(taken, ours.single[: len(taken)], answers.single)),
        ):
            about = {"peer": peer, "dtype": dtype, "in_flight": in_flight}
            rows.append({**about, **report.row(), "same_tokens_as_ours": same})
            print(_line(rows[-1]), flush=True)
    return rows, format_checks(batches, turns, dtype) if INT4 in peers else checks(batches, turns, ttft_s, dtype)


HEADER = f"{'':<26}{'dtype':<10}{'at once':>8}{'tok/s':>8}{latency_titles()}{'same tokens':>13}"


def _line(row: dict[str, Any]) -> str:
    failed = f"  {row['failed']} failed" if row["failed"] else ""
    beginning = f"{row['peer']:<26}{row['dtype']:<10}{row['in_flight']:>8}{row['output_tokens_per_s']:>8.1f}"
    return f"{beginning}{latency_cells(row)}{row['same_tokens_as_ours']:>13.1%}{failed}"


def keep_to_avx2(llama_cpp: Path) -> None:
    """Every engine, each in a process that this one starts, is one for a CPU without AVX-512."""
    kernels = Path(tempfile.gettempdir()) / "llmservice-bench" / "avx2-kernels"  # numba's cache of its own
    os.environ |= {**AVX2_ONLY, "NUMBA_CACHE_DIR": str(kernels)}
    sys.path.insert(0, str(llama_cpp))


def main(peers: Mapping[str, str], dtypes: Sequence[str], count: int, *, is_whole: bool) -> int:
    """is_whole: the results replace those of the last whole run."""
    if {LLAMA_CPP, Q8_0} & peers.keys() and find_spec("llama_cpp") is None:
        print("llama.cpp is missing: pip install -c constraints.txt -e '.[bench-peers]' compiles it, in minutes")
        return 2
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"  # of the peers' processes
    print(HEADER)
    rows, found = [], []
    for dtype in dtypes:
        measured, judged = compare(peers, dtype, count)
        rows += measured
        found += judged
    print(*(check.line() for check in found), sep="\n")
    settings = {"model": MODEL, "requests": count, "in_flight": IN_FLIGHT}
    name = "compare_formats" if INT4 in peers else "compare"
    if is_whole:
        Results(name, rows, found, settings).by_cpu().write()
    return 1 if any(row["failed"] for row in rows) else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=[peer for peer in CLASSES if peer != OURS], nargs="+", help="peers")
    parser.add_argument("--formats", action="store_true", help="8-bit weights, and transformers' code on our cache")
    parser.add_argument("--dtype", choices=DTYPES, nargs="+", default=DTYPES)
    parser.add_argument("--requests", type=int, default=REQUESTS)
    parser.add_argument("--avx2", type=Path, metavar="FOLDER", help="emulate AVX2 only; of llama.cpp's package")
    arguments = parser.parse_args()
    if arguments.avx2:
        keep_to_avx2(arguments.avx2)
    if arguments.formats:
        sys.exit(main(formats(), ["bfloat16"], arguments.requests, is_whole=arguments.requests == REQUESTS))
    is_whole = not arguments.only and {*arguments.dtype} == {*DTYPES} and arguments.requests == REQUESTS
    chosen = {peer: name for peer, name in CLASSES.items() if peer == OURS or peer in (arguments.only or CLASSES)}
    sys.exit(main(chosen, arguments.dtype, arguments.requests, is_whole=is_whole))
