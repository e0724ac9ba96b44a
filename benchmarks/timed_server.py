"""`llmservice serve` with the engine of timed_engine.py.

python benchmarks/timed_server.py SETTINGS STARTED_S serve FLAG…      SETTINGS is JSON: latency, num_blocks, load_s

The model is loaded `load_s` after STARTED_S, in seconds since 1970: however long imports take while several start.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from llmservice_server.commands.serve import add_arguments, serve

ENGINE = str(Path(__file__).with_name("timed_engine.py"))

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("settings")
    parser.add_argument("started_s", type=float)
    parser.add_argument("command", choices=["serve"])
    add_arguments(parser)
    args = parser.parse_args()
    loaded_s = args.started_s + json.loads(Path(args.settings).read_text(encoding="utf-8"))["load_s"]
    raise SystemExit(serve(args, (sys.executable, ENGINE, args.settings, str(loaded_s))))
