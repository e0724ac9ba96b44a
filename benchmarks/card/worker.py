"""The process that is on the card: it runs sections by name, and says in a file what each of them found.

python -m card.worker --log FILE --seconds S --folder DIR [--rehearse] NAME …
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

from card.section import Findings, run_in_turn
from card.section_log import SectionWriter
from card.sections import GRACE_S, SECTIONS

if TYPE_CHECKING:
    from card.stand import Stand

NO_CARD = 2
LOST_CARD = 3
_ABANDONED = 4
_LEAVES_BEHIND = {"transformers"}
"""Who else ran on the card: what is left there of their threads and caches goes with the process. Another follows."""


def sections() -> dict[str, Callable[[Stand], Findings]]:
    """By name."""
    from card import (
        attention_race,
        ceilings,
        engine,
        faults,
        kernels,
        overlap,
        sampling,
        throughput,
        transformers_peer,
    )

    return {
        "ceilings": ceilings.told,
        "checkpoint": engine.checkpoint,
        "start": engine.readiness,
        "steps": engine.steps,
        "host_syncs": overlap.host_syncs,
        "throughput": throughput.measure,
        "transformers": transformers_peer.measure,
        "kernels": kernels.speed,
        "agreement": kernels.agreement,
        "attention_race": attention_race.measure,
        "sampling": sampling.measure,
        "swapping": faults.swapping,
        "out_of_memory": faults.out_of_memory,
        "overlap": overlap.compare,
    }


def stand_of(folder: Path, rehearse: bool) -> Stand | None:
    """None where there is no card."""
    import torch

    from card.cuda_card import CudaCard
    from card.rehearsal import TOY, Processor
    from card.sizes import FULL
    from card.stand import Stand

    if rehearse:
        return Stand(Processor(), TOY, folder)
    return Stand(CudaCard(), FULL, folder) if torch.cuda.is_available() else None


def run(stand: Stand, names: Sequence[str], seconds: float, log: SectionWriter) -> int:
    """LOST_CARD once a section has left the card's context unusable: whatever followed would fail as well."""

    def cleared(section: Callable[[Stand], Findings]) -> Findings:
        stand.card.release()  # what a section that failed held is free only once its error is forgotten
        try:
            return section(stand)
        except BaseException:
            stand.clear()  # nobody knows what state its engine is in
            raise

    there = sections()
    for name, found in run_in_turn(
        {name: partial(cleared, there[name]) for name in names}, SECTIONS, seconds, partial(_begin, log)
    ):
        faulthandler.cancel_dump_traceback_later()
        log.done(name, found)
        print(name, *(check.line() for check in found.checks), *found.notes, sep="\n", flush=True)
        if name in _LEAVES_BEHIND and found.rows:
            break
        try:
            stand.card.synchronize()
        except RuntimeError as error:  # torch's word for CUDA's errors
            print(f"the card is lost: {error}", file=sys.stderr)
            return LOST_CARD
    return 0


def main(names: Sequence[str], seconds: float, folder: Path, log: SectionWriter, rehearse: bool) -> int:
    """NO_CARD where there is none. The `seconds` begin here, before torch is imported."""
    ends_s = time.monotonic() + seconds
    stand = stand_of(folder, rehearse)
    if stand is None:
        print("bench-gpu measures a CUDA card, and torch sees none here", file=sys.stderr)
        return NO_CARD
    log.card(stand.card.name)
    return run(stand, names, ends_s - time.monotonic(), log)


def _begin(log: SectionWriter, name: str) -> None:
    log.begun(name)
    faulthandler.dump_traceback_later(SECTIONS[name] + GRACE_S, exit=True)


def _end_with_parent() -> None:
    """A process that nobody waits for any more must not stay on the card."""
    os.read(0, 1)  # nothing is ever written: this returns when the other end is closed
    os._exit(_ABANDONED)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="+", choices=SECTIONS)
    parser.add_argument("--log", type=Path, required=True)
    parser.add_argument("--seconds", type=float, required=True, help="in which it will be ended")
    parser.add_argument("--folder", type=Path, required=True, help="of the checkpoint")
    parser.add_argument("--rehearse", action="store_true", help="small, and without a card")
    args = parser.parse_args()
    threading.Thread(target=_end_with_parent, daemon=True).start()
    sys.exit(main(args.names, args.seconds, args.folder, SectionWriter(args.log), args.rehearse))
