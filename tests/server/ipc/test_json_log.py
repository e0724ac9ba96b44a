"""Log lines are JSON objects, whatever is logged."""

from __future__ import annotations

import json
import logging
import sys

from llmservice_server.ipc.json_log import JsonFormatter


def _line(
    message: str, *args: object, fields: dict[str, object] | None = None, failed: bool = False
) -> dict[str, object]:
    error = sys.exc_info() if failed else None
    record = logging.LogRecord("llmservice.access", logging.INFO, __file__, 1, message, args, error)
    if fields is not None:
        record.fields = fields
    return json.loads(JsonFormatter().format(record))


def test_a_line_holds_the_message_and_its_fields() -> None:
    line = _line('said "%s"\n', "é", fields={"status": 200, "ttft_s": None})
    assert line.pop("time")
    assert line == {
        "level": "info",
        "logger": "llmservice.access",
        "message": 'said "é"\n',
        "status": 200,
        "ttft_s": None,
    }


def test_a_traceback_stays_in_one_line() -> None:
    try:
        {}["lost"]
    except KeyError:
        line = _line("broken", failed=True)
    assert "KeyError: 'lost'" in line["exception"]
