"""`llmservice serve` with the engine of timed_engine.py.

python benchmarks/timed_server.py SETTINGS serve FLAG…      SETTINGS is JSON: latency, num_blocks, load_s
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from llmservice_server.commands.serve import add_arguments, serve

ENGINE = str(Path(__file__).with_name("timed_engine.py"))

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("settings")
    parser.add_argument("command", choices=["serve"])
    add_arguments(parser)
    args = parser.parse_args()
    raise SystemExit(serve(args, (sys.executable, ENGINE, args.settings)))
