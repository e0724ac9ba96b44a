"""The process that is on the card: it runs sections by name, and says in a file what each of them found.

python -m card.worker --log FILE --seconds S --folder DIR NAME …
"""

from __future__ import annotations

import argparse
import faulthandler
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from card.names import SECTIONS
from card.section import Findings, run_in_turn
from card.section_log import SectionWriter

if TYPE_CHECKING:
    from card.ceilings import Ceilings

NO_CARD = 2
LOST_CARD = 3
_SECTION_S = 200  # a section that takes longer hangs: its process shows where, and ends


def sections(folder: Path, limits: Ceilings) -> dict[str, Callable[[], Findings]]:
    """By name. The figures of some are shares of the card's `limits`."""
    from card import attention_race, engine, faults, kernels, llama, overlap, sampling, throughput

    copy, matmul = limits.copy_bytes_per_s / 1e12, limits.matmul_flops / 1e12
    first = Findings(rows=[{"part": "ceilings", "copy TB/s": copy, "matmul TFLOP/s": matmul}])

    def with_release(section: Callable[[], Findings]) -> Findings:
        try:
            return section()
        finally:
            engine.release()

    def written() -> Findings:
        llama.write(folder)
        return Findings()

    found: dict[str, Callable[[], Findings]] = {
        "ceilings": lambda: first,
        "agreement": kernels.agreement,
        "kernels": partial(kernels.speed, limits),
        "attention_race": attention_race.measure,
        "sampling": sampling.measure,
        "swapping": faults.swapping,
        "checkpoint": written,
        "start": partial(engine.readiness, folder),
        "steps": partial(engine.steps, folder, limits),
        "throughput": partial(throughput.compare, folder),
        "host_syncs": partial(overlap.host_syncs, folder),
        "out_of_memory": partial(faults.out_of_memory, folder),
        "overlap": partial(overlap.compare, folder),
    }
    return {name: partial(with_release, section) for name, section in found.items()}


def main(names: Sequence[str], seconds: float, folder: Path, log: SectionWriter) -> int:
    """LOST_CARD once a section has left the card's context unusable: whatever followed would fail as well."""
    import torch

    from card import ceilings

    if not torch.cuda.is_available():
        print("bench-gpu measures a CUDA card, and torch sees none here", file=sys.stderr)
        return NO_CARD
    log.card(torch.cuda.get_device_name())
    there = sections(folder, ceilings.measure())
    for name, findings in run_in_turn({name: there[name] for name in names}, seconds, partial(_begin, log)):
        faulthandler.cancel_dump_traceback_later()
        log.done(name, findings)
        try:
            torch.cuda.synchronize()
        except RuntimeError as error:  # torch's word for CUDA's errors
            print(f"the card is lost: {error}", file=sys.stderr)
            return LOST_CARD
    return 0


def _begin(log: SectionWriter, name: str) -> None:
    log.begun(name)
    faulthandler.dump_traceback_later(_SECTION_S, exit=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="+", choices=SECTIONS)
    parser.add_argument("--log", type=Path, required=True)
    parser.add_argument("--seconds", type=float, required=True, help="after which no further section is begun")
    parser.add_argument("--folder", type=Path, required=True, help="of the checkpoint")
    args = parser.parse_args()
    sys.exit(main(args.names, args.seconds, args.folder, SectionWriter(args.log)))
