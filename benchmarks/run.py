"""`make bench`: runs the benchmarks one after the other, prints their targets, and writes docs/benchmarks.md.

python benchmarks/run.py                   those of `make bench`, in less than 20 minutes
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
from llmservice_bench.results import FOLDER, Check
from report import BENCHMARKS, Benchmark


def run(benchmarks: Sequence[Benchmark]) -> list[str]:
    """Run benchmarks one after the other; returns the names of those that failed."""
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


def checks(benchmarks: Sequence[Benchmark], since_s: float, results: Path = FOLDER) -> list[Check]:
    """The checks in the results that these benchmarks wrote since then: others are of earlier runs."""
    found = []
    for benchmark in benchmarks:
        for path in sorted(results.glob("*.json")):
            if benchmark.wrote(path.stem) and path.stat().st_mtime >= since_s:
                checked = json.loads(path.read_text(encoding="utf-8")).get("checks", ())
                found += [Check(check["what"], check["bound"], check["measured"], check["unit"]) for check in checked]
    return found


def main(names: Sequence[str]) -> int:
    """Returns 1 if a benchmark failed; a missed target is a valid result."""
    chosen = [each for each in BENCHMARKS if (each.name in names if names else each.in_make_bench)]
    began_s = time.time()
    failed = run(chosen)
    print("\n" + "\n".join(check.line() for check in checks(chosen, began_s)))
    report.write()
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[[], *(each.name for each in BENCHMARKS)], metavar="NAME")
    sys.exit(main(parser.parse_args().names))
