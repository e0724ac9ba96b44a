"""Recorded traffic is read from public traces and from logs; an unusable line is named."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmservice_planner.traffic.traces import FORMATS, Format, TraceError, TraceRequest, iter_requests, read_requests

AZURE_2023 = """\
TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
2023-11-16 18:15:51.2224670,879,55
2023-11-16 18:15:51.3910170,91,16
2023-11-16 18:15:52.5736420,91,16
2023-11-16 18:15:54.0000000,381,84
2023-11-16 18:15:54.7200000,1313,142
2023-11-16 18:15:55.0000000,388,84
2023-11-16 18:15:55.5000000,242,14
2023-11-16 18:15:56.6805900,209,152
"""
AZURE_2024 = """\
TIMESTAMP,ContextTokens,GeneratedTokens
2024-05-10 00:00:00.009930+00:00,2162,5
2024-05-10 00:00:00.017335+00:00,2399,6
2024-05-10 00:00:00.021314+00:00,76,15
2024-05-10 00:00:00.037068+00:00,2376,8
2024-05-10 00:00:01+00:00,5054,217
2024-05-10 00:00:01.125000+00:00,1502,10
2024-05-10 00:00:02.250000+00:00,2379,8
2024-05-10 00:00:03.500000+00:00,1045,1
2024-05-10 00:00:04.009930+00:00,7436,46
2024-05-10 00:00:10.009930+00:00,2389,8
"""
BURSTGPT = """\
Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45,ChatGPT,1087,230,1317,Conversation log
118,GPT-4,417,276,693,Conversation log
185,ChatGPT,1360,647,2007,Conversation log
208,ChatGPT,185,215,400,Conversation log
231,GPT-4,1024,0,1024,API log
271,ChatGPT,1090,330,1420,Conversation log
301,GPT-4,2164,391,2555,API log
310.5,ChatGPT,100,10,110,API log
415,ChatGPT,79,27,106,Conversation log
"""
MOONCAKE = """\
{"timestamp": 0, "input_length": 1500, "output_length": 500, "hash_ids": [0, 1, 2]}
{"timestamp": 0, "input_length": 1600, "output_length": 490, "hash_ids": [0, 3, 4, 5]}
{"timestamp": 3052, "input_length": 512, "output_length": 794, "hash_ids": [0]}
{"timestamp": 3052, "input_length": 513, "output_length": 316, "hash_ids": [0, 6]}
{"timestamp": 3500, "input_length": 2287, "output_length": 316, "hash_ids": [0, 42, 43, 44, 45]}
{"timestamp": 4001, "input_length": 655, "output_length": 52, "hash_ids": [46, 47]}
{"timestamp": 6002, "input_length": 655, "output_length": 1, "hash_ids": [46, 47]}
{"timestamp": 7003, "input_length": 672, "output_length": 26, "hash_ids": [46, 48]}
{"timestamp": 9104, "input_length": 30, "output_length": 2, "hash_ids": [49]}
{"timestamp": 10000, "input_length": 40, "output_length": 3, "hash_ids": []}
"""


def chat(created: int, prompt: int, output: int, cached: int | None = None) -> dict[str, object]:
    details = {} if cached is None else {"prompt_tokens_details": {"cached_tokens": cached, "audio_tokens": 0}}
    usage = {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output, **details}
    return {"id": "chatcmpl-1", "object": "chat.completion", "created": created, "choices": [], "usage": usage}


def batch(body: dict[str, object]) -> dict[str, object]:
    return {"id": "batch_req_1", "custom_id": "a", "response": {"status_code": 200, "body": body}, "error": None}


OPENAI = "\n".join(
    json.dumps(line)
    for line in [
        chat(1_700_000_000, 100, 10),
        chat(1_700_000_003, 200, 20, cached=128),
        {"object": "chat.completion.chunk", "created": 1_700_000_004, "choices": [], "usage": None},
        {**chat(1_700_000_004, 300, 30), "object": "chat.completion.chunk"},
        {"object": "text_completion", "created": 1_700_000_005, "usage": {"prompt_tokens": 7, "completion_tokens": 8}},
        {
            "object": "response",
            "created_at": 1_700_000_006,
            "usage": {"input_tokens": 50, "output_tokens": 60, "input_tokens_details": {"cached_tokens": 16}},
        },
        batch(chat(1_700_000_009, 400, 40)),
        {"id": "batch_req_2", "custom_id": "b", "response": None, "error": {"code": "batch_expired"}},
        batch({"error": {"message": "context too long"}}),
        chat(1_700_000_010, 500, 50, cached=0),
    ]
)


def access(time: str, **fields: object) -> str:
    return json.dumps(
        {"time": time, "level": "info", "logger": "llmservice.access", "message": "request", "status": 200, **fields}
    )


ACCESS_LOG = "\n".join(
    [
        json.dumps({"time": "2026-01-05T10:00:00.000+00:00", "level": "info", "logger": "llmservice", "message": "up"}),
        access("2026-01-05T10:00:03.000+00:00", prompt_tokens=20, completion_tokens=30, duration_s=2.0),
        access(
            "2026-01-05T10:00:02.500+00:00", prompt_tokens=40, cached_tokens=16, completion_tokens=50, duration_s=0.5
        ),
        access("2026-01-05T10:00:04.000+00:00", status=429, duration_s=0.001),
        access("2026-01-05T10:00:04.000+00:00", path="/v1/embeddings", inputs=1, prompt_tokens=9, duration_s=0.01),
        access("2026-01-05T10:00:05.250+00:00", lane="batch", prompt_tokens=60, completion_tokens=1, duration_s=0.25),
        access("2026-01-05T10:00:06.000+00:00", prompt_tokens=1, completion_tokens=1, duration_s=0),
        access("2026-01-05T10:00:07.000+00:00", prompt_tokens=2, completion_tokens=2, duration_s=0),
        access("2026-01-05T10:00:08.000+00:00", prompt_tokens=3, completion_tokens=3, duration_s=0),
        access("2026-01-05T10:00:11.000+00:00", prompt_tokens=4, completion_tokens=4, duration_s=0),
    ]
)


@pytest.mark.parametrize(
    ("name", "text", "count", "some"),
    [
        (
            "azure",
            AZURE_2023,
            10,
            {0: TraceRequest(0.0, 374, 44), 2: TraceRequest(4.541877, 879, 55), 9: TraceRequest(10, 209, 152)},
        ),
        ("azure", AZURE_2024, 10, {4: TraceRequest(0.99007, 5054, 217), 9: TraceRequest(10.0, 2389, 8)}),
        ("burstgpt", BURSTGPT, 9, {1: TraceRequest(40, 1087, 230), 7: TraceRequest(305.5, 100, 10)}),
        (
            "mooncake",
            MOONCAKE,
            10,
            {
                1: TraceRequest(0, 1600, 490, (0, 3, 4, 5)),
                2: TraceRequest(3.052, 512, 794, (0,)),
                9: TraceRequest(10, 40, 3),
            },
        ),
        (
            "openai",
            OPENAI,
            7,
            {
                1: TraceRequest(3, 200, 20, cached_tokens=128),
                4: TraceRequest(6, 50, 60, cached_tokens=16),
                5: TraceRequest(9, 400, 40),
            },
        ),
        (
            "access-log",
            ACCESS_LOG,
            7,
            {
                0: TraceRequest(0, 20, 30),
                1: TraceRequest(1, 40, 50, cached_tokens=16),
                2: TraceRequest(4, 60, 1, lane="batch"),
            },
        ),
    ],
)
def test_each_format_is_detected_and_read(
    tmp_path: Path, name: Format, text: str, count: int, some: dict[int, TraceRequest]
) -> None:
    path = tmp_path / "trace"
    path.write_text(text)
    assert len(text.splitlines()) in {10, 11}
    requests = read_requests([path])
    assert len(requests) == count
    for place, expected in some.items():
        found = requests[place]
        assert found.arrival_s == pytest.approx(expected.arrival_s, abs=1e-6)
        assert (found.prompt_tokens, found.output_tokens) == (expected.prompt_tokens, expected.output_tokens)
        assert (found.hash_ids, found.cached_tokens) == (expected.hash_ids, expected.cached_tokens)
    assert read_requests([path], name) == requests


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "contains no request"),
        ("\n\n", "contains no request"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "contains no request"),
        ("TIMESTAMP,ContextTokens\n1,2\n", "no column GeneratedTokens; found"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n1,2,x\n", "line 2: lengths must be whole numbers, found .'1', '2'"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n1,2,3\n1,2\n", "line 3: fewer columns than the header"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n1,0,3\n", "line 2: lengths must be at least 1"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n5,1,1\nnoon,1,1\n", "line 3: TIMESTAMP must be ISO 8601 or a numb"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\nnan,1,1\n", "line 2: TIMESTAMP must be a finite number"),
        ("\n\nTIMESTAMP,ContextTokens,GeneratedTokens\nnan,1,1\n", "line 4: TIMESTAMP"),
        ("Timestamp,Request tokens,Response tokens\n1,-2,5\n", "line 2: lengths must be at least 1"),
        (f"Timestamp,Request tokens,Response tokens\n1,2,{10**30}\n", "line 2: lengths must be at most"),
        ("prompt,answer\n1,2\n", "line 1: of no known format .azure, burstgpt, mooncake"),
        ('{"a": 1}\n', "line 1: of no known format"),
        (MOONCAKE + "{not json\n", "line 11: expected a JSON object, found '{not json'"),
        (MOONCAKE + "[1]\n", "line 11: expected a JSON object"),
        ('{"timestamp": 0, "input_length": 5}\n', "line 1: output_length must be a whole number"),
        ('{"timestamp": "x", "input_length": 5, "output_length": 1}\n', "line 1: timestamp must be a finite number"),
        (
            '{"timestamp": 0, "input_length": 513, "output_length": 1, "hash_ids": [1, 2, 3]}\n',
            "line 1: hash_ids has 3 entries, expected one for each 512 tokens",
        ),
        ('{"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": ["a"]}\n', "hash_ids must be a list"),
        ('{"object": "chat.completion", "created": 5}\n', "line 1: no usage"),
        (
            '{"usage": {"prompt_tokens": 1, "completion_tokens": 1}}\n',
            "line 1: created_at must be a finite number",
        ),
        (access("noon", prompt_tokens=1, completion_tokens=1, duration_s=1), "line 1: time must be ISO 8601"),
    ],
)
def test_unusable_line_is_named(tmp_path: Path, text: str, complaint: str) -> None:
    path = tmp_path / "trace"
    path.write_text(text)
    with pytest.raises(TraceError, match=complaint) as raised:
        read_requests([path])
    assert str(path) in str(raised.value)


def test_absent_file_and_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="cannot read the trace"):
        read_requests([tmp_path / "absent.csv"])
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(TraceError, match="cannot read the trace"):
        read_requests([tmp_path / "binary"])


def test_files_of_one_clock_are_merged_by_arrival(tmp_path: Path) -> None:
    for name, times in (("late", (30, 20)), ("early", (10, 25))):
        rows = "".join(f"{time},{time},1\n" for time in times)
        (tmp_path / name).write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + rows)
    requests = read_requests([tmp_path / "late", tmp_path / "early"])
    assert [(each.arrival_s, each.prompt_tokens) for each in requests] == [(0, 10), (10, 20), (15, 25), (20, 30)]


def test_files_without_a_common_clock_are_not_merged(tmp_path: Path) -> None:
    (tmp_path / "a").write_text(AZURE_2023)
    (tmp_path / "b").write_text(BURSTGPT)
    with pytest.raises(TraceError, match="no common start"):
        read_requests([tmp_path / "a", tmp_path / "b"])


def test_requests_are_read_as_they_are_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_text(AZURE_2023 + "broken\n")
    requests = iter_requests([path])
    assert next(requests).prompt_tokens == 374  # the broken line at the end has not been read
    with pytest.raises(TraceError, match="line 12"):
        list(requests)


@given(st.text(max_size=200), st.sampled_from([None, *FORMATS]))
def test_any_text_is_read_or_refused(tmp_path_factory: pytest.TempPathFactory, text: str, name: Format | None) -> None:
    path = tmp_path_factory.mktemp("any") / "trace"
    path.write_text(text, encoding="utf-8", errors="replace")
    with contextlib.suppress(TraceError):
        assert read_requests([path], name)
