"""The process that uses the GPU: runs sections by name and writes their findings to a log file.

python -m gpu_bench.worker --log FILE --seconds S --folder DIR [--rehearse] NAME …
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from gpu_bench.sections import GRACE_S, SECTIONS, Findings, SectionWriter, run_in_turn

if TYPE_CHECKING:
    from gpu_bench.bench import Bench

NO_GPU = 2
LOST_GPU = 3
_ABANDONED = 4
_ENDS_PROCESS = {"transformers"}
"""Sections after which the process ends, to free the threads and caches of other libraries."""


def sections() -> dict[str, Callable[[Bench], Findings]]:
    """The sections by name."""
    from gpu_bench import bench, engine, families, faults, kernels, overlap, products, throughput

    return {
        "ceilings": bench.ceilings,
        "checkpoint": engine.checkpoint,
        "start": engine.readiness,
        "steps": engine.steps,
        "host_syncs": overlap.host_syncs,
        "throughput": throughput.throughput,
        "transformers": throughput.transformers,
        "kernels": kernels.speed,
        "quantized": products.quantized,
        "experts": products.experts,
        "attention_race": kernels.attention_race,
        "sampling": kernels.sampling,
        "swapping": faults.swapping,
        "agreement": kernels.agreement,
        "families": families.families,
        "formats": families.formats,
        "by_transformers": engine.by_transformers,
        "with_adapters": engine.with_adapters,
        "out_of_memory": faults.out_of_memory,
        "overlap": overlap.compare,
    }


def bench_of(folder: Path, rehearse: bool) -> Bench | None:
    """None without a GPU."""
    import torch

    from gpu_bench.bench import Bench
    from gpu_bench.device import CudaDevice
    from gpu_bench.rehearsal import TOY, CPUDevice
    from gpu_bench.sizes import FULL

    if rehearse:
        return Bench(CPUDevice(), TOY, folder)
    return Bench(CudaDevice(), FULL, folder) if torch.cuda.is_available() else None


def run(bench: Bench, names: Sequence[str], seconds: float, log: SectionWriter) -> int:
    """Run sections and log them; returns LOST_GPU if one has left the CUDA context unusable."""

    def cleared(section: Callable[[Bench], Findings]) -> Findings:
        bench.gpu.release()  # memory of a failed section is freed only after its exception is deleted
        try:
            return section(bench)
        except BaseException:
            bench.clear()  # the state of its engine is undefined
            raise

    by_name = sections()
    for name, found in run_in_turn(
        {name: partial(cleared, by_name[name]) for name in names}, SECTIONS, seconds, partial(_begin, log)
    ):
        faulthandler.cancel_dump_traceback_later()
        log.done(name, found)
        print(name, *(check.line() for check in found.checks), *found.notes, sep="\n", flush=True)
        if name in _ENDS_PROCESS and found.rows:
            break
        try:
            bench.gpu.synchronize()
        except RuntimeError as error:  # torch raises it for CUDA errors
            print(f"the CUDA context is unusable: {error}", file=sys.stderr)
            return LOST_GPU
    return 0


def main(names: Sequence[str], seconds: float, folder: Path, log: SectionWriter, rehearse: bool) -> int:
    """Returns NO_GPU without a GPU. The `seconds` include the import of torch."""
    ends_s = time.monotonic() + seconds
    bench = bench_of(folder, rehearse)
    if bench is None:
        print("bench-gpu needs a CUDA GPU, and torch finds none", file=sys.stderr)
        return NO_GPU
    log.gpu(bench.gpu.name)
    return run(bench, names, ends_s - time.monotonic(), log)


def _begin(log: SectionWriter, name: str) -> None:
    log.begun(name)
    faulthandler.dump_traceback_later(SECTIONS[name] + GRACE_S, exit=True)


def _end_with_parent() -> None:
    """End this process when its parent has ended, so that it does not keep the GPU."""
    os.read(0, 1)  # returns when the other end is closed, as nothing is written
    os._exit(_ABANDONED)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="+", choices=SECTIONS)
    parser.add_argument("--log", type=Path, required=True)
    parser.add_argument("--seconds", type=float, required=True, help="time limit of the process")
    parser.add_argument("--folder", type=Path, required=True, help="of the checkpoint")
    parser.add_argument("--rehearse", action="store_true", help="small sizes, without a GPU")
    args = parser.parse_args()
    threading.Thread(target=_end_with_parent, daemon=True).start()
    sys.exit(main(args.names, args.seconds, args.folder, SectionWriter(args.log), args.rehearse))
