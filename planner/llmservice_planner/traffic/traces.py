"""Recorded traffic: when requests arrived and how long they were, from public traces and from logs.

- azure: CSV of the Azure LLM inference traces 2023 and 2024: TIMESTAMP (ISO 8601, or seconds), ContextTokens,
  GeneratedTokens
- burstgpt: CSV of BurstGPT (arXiv:2401.17644): Timestamp in seconds, Request tokens, Response tokens (0: it failed)
- mooncake: JSON of the Mooncake traces (FAST '25): timestamp in milliseconds, input_length, output_length, hash_ids
- openai: JSON of OpenAI responses with `created` and `usage`, also as output lines of the batch API
- access-log: JSON of our server's log, whose lines of other loggers are skipped

Of text, nothing is read.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import chain
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal, get_args

HASH_TOKENS = 512
"""Prompt tokens that one of Mooncake's `hash_ids` stands for; the last may stand for fewer."""
_HASHES = 2**48
"""So many `hash_ids` are told apart, by their last bits: hashes of 64 bits may be negative, and the simulation marks
those above for itself."""
_SHOWN = 120
_MOST_TOKENS = 10**9


class TraceError(ValueError):
    """The trace is unusable; the message names the file and the line."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """A request of recorded traffic."""

    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...] = ()
    """Of the prompt's blocks of `HASH_TOKENS`; equal ids have equal prefixes. Empty: not recorded."""
    lane: str = "interactive"
    """Of the server's log; other formats record none."""
    cached_tokens: int | None = None
    """Prompt tokens that the recording server had in its cache; None: not recorded."""
    max_tokens: int | None = None
    """That the client allowed for the answer; None: not recorded, as by all formats."""


Format = Literal["azure", "burstgpt", "mooncake", "openai", "access-log"]
FORMATS: tuple[Format, ...] = get_args(Format)
_SINCE_START = ("burstgpt", "mooncake")  # their times count from the trace's start, those of the others from 1970


def read_requests(paths: Sequence[Path], format: Format | None = None) -> list[TraceRequest]:  # noqa: A002 - as the flag
    """The requests of all files on one clock, sorted by arrival, the first of which is at 0.

    Raises:
        TraceError: a file cannot be read, a line is unusable, or there is no request.
    """
    requests = sorted(iter_requests(paths, format), key=attrgetter("arrival_s"))
    start_s = requests[0].arrival_s
    return [replace(each, arrival_s=each.arrival_s - start_s) for each in requests]


def iter_requests(paths: Sequence[Path], format: Format | None = None) -> Iterator[TraceRequest]:  # noqa: A002
    """The requests in the order of the files, read line by line; `arrival_s` is on the files' own clock.

    `format` None: each file's is detected from its first line. Raises `TraceError` as `read_requests`.
    """
    formats: dict[Format, Path] = {}
    for path in paths:
        empty = True
        for found, request in _read(path, format):
            if empty:
                formats.setdefault(found, path)
                _check_clocks(formats)
            empty = False
            yield request
        if empty:
            raise TraceError(f"{path} contains no request")
    if not paths:
        raise TraceError("no trace is given")


def _check_clocks(formats: Mapping[Format, Path]) -> None:
    if len({name in _SINCE_START for name in formats}) > 1:
        listed = ", ".join(f"{path} ({name})" for name, path in formats.items())
        raise TraceError(f"the times of {listed} have no common start: read them one at a time")


def _read(path: Path, wanted: Format | None) -> Iterator[tuple[Format, TraceRequest]]:
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            head = _head(file)
            found = wanted or _detect(path, len(head), head[-1])
            lines = chain(head, file)
            rows = _csv_rows(path, lines, _CSV[found]) if found in _CSV else _json_rows(path, lines, _JSON[found])
            for request in rows:
                yield found, request
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise TraceError(f"cannot read the trace {path}: {error}") from error


def _head(file: Iterable[str]) -> list[str]:
    """The lines up to the first that is not blank."""
    head = [""]
    for line in file:
        head.append(line)
        if line.strip():
            break
    return head[1:] or head


def _detect(path: Path, number: int, first: str) -> Format:
    if not first.strip():
        raise TraceError(f"{path} contains no request")
    if not first.lstrip().startswith("{"):
        columns = {name.strip() for name in first.split(",")}
        for name, (needed, _) in _CSV.items():
            if columns & {*needed[1:]}:
                return name
    else:
        row = _parse_json(path, number, first)
        for name, keys in _MARKS.items():
            if any(key in row for key in keys):
                return name
    raise TraceError(
        f"{path}, line {number}: of no known format ({', '.join(FORMATS)}), found {first.strip()[:_SHOWN]!r}: "
        "give CSV with the columns TIMESTAMP, ContextTokens and GeneratedTokens, or a format"
    )


_MARKS: Mapping[Format, tuple[str, ...]] = {
    "mooncake": ("input_length", "hash_ids"),
    "access-log": ("logger",),
    "openai": ("usage", "response", "object", "choices"),
}
"""Keys of a line by which a JSON format is detected."""


def _csv_rows(path: Path, lines: Iterable[str], layout: tuple[tuple[str, ...], _CsvParser]) -> Iterator[TraceRequest]:
    columns, parse = layout
    reader = csv.reader(lines)
    header = [name.strip() for name in next((row for row in reader if row), [])]
    if missing := [name for name in columns if name not in header]:
        raise TraceError(f"{path}: no column {', '.join(missing)}; found {header}")
    places = [header.index(name) for name in columns]
    for row in reader:
        if not row:
            continue
        try:
            request = parse(*(row[place] for place in places))
        except IndexError:
            raise TraceError(f"{path}, line {reader.line_num}: fewer columns than the header, found {row}") from None
        except ValueError as error:
            raise TraceError(f"{path}, line {reader.line_num}: {error}, found {row}") from error
        if request is not None:
            yield request


def _json_rows(path: Path, lines: Iterable[str], parse: _JsonParser) -> Iterator[TraceRequest]:
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        row = _parse_json(path, number, line)
        try:
            request = parse(row)
        except ValueError as error:
            raise TraceError(f"{path}, line {number}: {error}, found {line.strip()[:_SHOWN]}") from error
        if request is not None:
            yield request


def _parse_json(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        row = None
    if not isinstance(row, dict):
        raise TraceError(f"{path}, line {number}: expected a JSON object, found {line.strip()[:_SHOWN]!r}")
    return row


def _azure(timestamp: str, prompt: str, output: str) -> TraceRequest:
    return TraceRequest(_seconds(timestamp, "TIMESTAMP"), *_lengths(_whole(prompt), _whole(output)))


def _burstgpt(timestamp: str, prompt: str, output: str) -> TraceRequest | None:
    output_tokens = _whole(output)
    if output_tokens == 0:
        return None
    return TraceRequest(_number(timestamp, "Timestamp"), *_lengths(_whole(prompt), output_tokens))


def _mooncake(row: Mapping[str, Any]) -> TraceRequest:
    lengths = _lengths(row.get("input_length"), row.get("output_length"), ("input_length", "output_length"))
    ids = row.get("hash_ids") or ()
    if not isinstance(ids, list | tuple) or not all(isinstance(each, int) for each in ids):
        raise ValueError("hash_ids must be a list of whole numbers")
    if len(ids) > -(-lengths[0] // HASH_TOKENS):
        raise ValueError(f"hash_ids has {len(ids)} entries, expected one for each {HASH_TOKENS} tokens of input_length")
    return TraceRequest(
        _number(row.get("timestamp"), "timestamp") / 1e3, *lengths, hash_ids=tuple(each % _HASHES for each in ids)
    )


def _openai(row: Mapping[str, Any]) -> TraceRequest | None:
    """Of the chat, completions and responses APIs. None for the chunks of a stream before the last, and for errors."""
    batch = row.get("response")
    body = batch.get("body") if isinstance(batch, Mapping) else row
    if row.get("error") or ("custom_id" in row and batch is None):
        return None
    if not isinstance(body, Mapping):
        raise ValueError("response has no body")  # noqa: TRY004 - of the trace, not of the program
    if body.get("error"):
        return None
    usage = body.get("usage")
    if usage is None and str(body.get("object", "")).endswith(".chunk"):
        return None
    if not isinstance(usage, Mapping):
        raise ValueError("no usage: a stream's last chunk has it, with include_usage")  # noqa: TRY004 - likewise
    names = ("prompt_tokens", "completion_tokens") if "prompt_tokens" in usage else ("input_tokens", "output_tokens")
    lengths = _lengths(usage.get(names[0]), usage.get(names[1]), names)
    details = usage.get(f"{names[0]}_details")
    cached = details.get("cached_tokens") if isinstance(details, Mapping) else None
    created = "created" if "created" in body else "created_at"
    return TraceRequest(_number(body.get(created), created), *lengths, cached_tokens=_cached(cached, lengths[0]))


def _access_log(row: Mapping[str, Any]) -> TraceRequest | None:
    """None for lines of other loggers, for refused requests, which have no lengths, and for embeddings."""
    if row.get("logger") != "llmservice.access" or not row.get("completion_tokens"):
        return None
    names = ("prompt_tokens", "completion_tokens")
    lengths = _lengths(row.get(names[0]), row.get(names[1]), names)
    ended_s, took_s = _seconds(str(row.get("time")), "time"), _number(row.get("duration_s"), "duration_s")
    lane = "batch" if row.get("lane") == "batch" else "interactive"
    cached_tokens = _cached(row.get("cached_tokens"), lengths[0])
    return TraceRequest(ended_s - took_s, *lengths, lane=lane, cached_tokens=cached_tokens)


_CsvParser = Callable[..., TraceRequest | None]
_JsonParser = Callable[[Mapping[str, Any]], TraceRequest | None]
_CSV: Mapping[Format, tuple[tuple[str, ...], _CsvParser]] = {
    "azure": (("TIMESTAMP", "ContextTokens", "GeneratedTokens"), _azure),
    "burstgpt": (("Timestamp", "Request tokens", "Response tokens"), _burstgpt),
}
_JSON: Mapping[Format, _JsonParser] = {"mooncake": _mooncake, "openai": _openai, "access-log": _access_log}


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError as error:
        raise ValueError("lengths must be whole numbers") from error


def _lengths(prompt: object, output: object, names: tuple[str, ...] = ()) -> tuple[int, int]:
    for value, name in zip((prompt, output), names, strict=False):
        if isinstance(value, bool) or not isinstance(value, int):
            raise ValueError(f"{name} must be a whole number")  # noqa: TRY004 - of the trace, not of the program
    if not isinstance(prompt, int) or not isinstance(output, int) or prompt < 1 or output < 1:
        raise ValueError("lengths must be at least 1")
    if max(prompt, output) > _MOST_TOKENS:
        raise ValueError("lengths must be at most 10**9")
    return prompt, output


def _cached(value: object, prompt_tokens: int) -> int | None:
    return min(value, prompt_tokens) if isinstance(value, int) and value >= 0 else None


def _number(value: object, name: str) -> float:
    try:
        number = float(value) if isinstance(value, int | float | str) else math.nan
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"{name} must be a finite number")
    return number


def _seconds(text: str, name: str) -> float:
    """Of a number of seconds, or since 1970 of ISO 8601, in UTC where it names no zone."""
    try:
        seconds = float(text)
    except ValueError:
        try:
            time = datetime.fromisoformat(text)
        except ValueError as error:
            raise ValueError(f"{name} must be ISO 8601 or a number of seconds") from error
        return (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp()
    return _number(seconds, name)
