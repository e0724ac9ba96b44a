"""`make bench`: every benchmark, one after the other, then what all of them promised and what was measured of it.

python benchmarks/run.py                   those of `make bench`, in less than 20 minutes, and docs/benchmarks.md
python benchmarks/run.py serve strategies  some of them
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import report
from catalogue import BENCHMARKS, Benchmark
from llmservice_bench.results import FOLDER, Check


def run(benchmarks: Sequence[Benchmark]) -> list[str]:
    """Run them one after the other; the names of those that failed."""
    failed = []
    for benchmark in benchmarks:
        print(f"\n{benchmark.title} ({benchmark.name}.py, about {benchmark.minutes:g} minutes)", flush=True)
        started_s = time.monotonic()
        try:
            command = [sys.executable, str(benchmark.script)]
            status = subprocess.run(command, timeout=120 * benchmark.minutes, check=False).returncode  # noqa: S603 - ours
        except subprocess.TimeoutExpired:
            print(f"stopped after {2 * benchmark.minutes:g} minutes", file=sys.stderr)
            status = 1
        if status:
            failed.append(benchmark.name)
        print(f"{benchmark.name}.py took {(time.monotonic() - started_s) / 60:.1f} minutes", flush=True)
    return failed


def checks(benchmarks: Sequence[Benchmark], results: Path = FOLDER) -> list[Check]:
    """What these benchmarks left behind of promises."""
    found = []
    for benchmark in benchmarks:
        for path in sorted(results.glob("*.json")):
            if benchmark.wrote(path.stem):
                told = json.loads(path.read_text(encoding="utf-8")).get("checks", ())
                found += [Check(check["what"], check["bound"], check["measured"], check["unit"]) for check in told]
    return found


def main(names: Sequence[str]) -> int:
    """1 where a benchmark failed; a target that is missed is a result."""
    chosen = [each for each in BENCHMARKS if (each.name in names if names else each.in_make_bench)]
    failed = run(chosen)
    print("\n" + "\n".join(check.line() for check in checks(chosen)))
    report.write()
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[[], *(each.name for each in BENCHMARKS)], metavar="NAME")
    sys.exit(main(parser.parse_args().names))
