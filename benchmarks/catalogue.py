"""The benchmarks that there are."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent


@dataclass(frozen=True, slots=True)
class Benchmark:
    """A script that runs alone, too. It leaves <name>.json behind, or several <name>_<part>.json."""

    name: str
    title: str
    minutes: float
    """What it takes on two cores; it is stopped after twice that."""
    in_make_bench: bool = True

    @property
    def script(self) -> Path:
        return HERE / f"{self.name}.py"

    def wrote(self, results_name: str) -> bool:
        return results_name == self.name or results_name.startswith(f"{self.name}_")


BENCHMARKS = (
    Benchmark("compare", "Beside what people would use instead", 8),
    Benchmark("strategies", "Static, dynamic and continuous batching", 5),
    Benchmark("roofline", "How far the machine's limits are", 1.5),
    Benchmark("serve", "Throughput and latency over HTTP", 2),
    Benchmark("micro", "The pieces around the model", 3),
    Benchmark("operator_scale", "The operator with 1,000 services", 8, in_make_bench=False),
    Benchmark("gpu", "On a GPU", 9, in_make_bench=False),
    Benchmark("soak", "Minutes of full load", 10, in_make_bench=False),
)
"""In the order of the report."""
