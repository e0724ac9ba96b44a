"""A laptop without a cluster or an accelerator simulates."""

import subprocess
import sys

_BLOCKED = ("torch", "kopf", "kubernetes", "aiohttp", "fastapi", "matplotlib", "transformers")


def test_the_command_runs_without_torch_kopf_kubernetes_and_matplotlib() -> None:
    code = (
        f"import sys\nfor name in {_BLOCKED!r}: sys.modules[name] = None\n"
        "from llmservice_bench.simulation import builtin, clairvoyant, command, fleet, policies, report, service\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
