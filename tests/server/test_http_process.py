"""The HTTP process is light: it answers probes while the engine's process still imports."""

from __future__ import annotations

import subprocess
import sys


def test_the_http_process_imports_neither_torch_nor_transformers() -> None:
    program = (
        "import sys, llmservice_server.http_process, llmservice_server.serve_command;"
        "print(*{'torch', 'transformers'} & sys.modules.keys())"
    )
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert done.stdout == "\n"
