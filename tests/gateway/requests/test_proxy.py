"""A pod's events, in any pieces."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from llmservice_gateway.requests.proxy import EventRelay
from llmservice_gateway.routing.demand import Usage

EVENTS = [
    b'data: {"n": 1}\n\n',
    b": a comment\n\n",
    b"event: x\ndata: : llmservice-usage 1 2 3\n\n",
    b"data: [DONE]\n\n",
]
REPORT = b": llmservice-usage 7 3 2\n\n"


@given(st.sets(st.integers(1, 200), max_size=8))
def test_events_are_passed_on_whole_and_the_report_is_taken_out(cuts: set[int]) -> None:
    stream = b"".join(EVENTS[:-1]) + REPORT + EVENTS[-1]
    edges = [0, *sorted(cut for cut in cuts if cut < len(stream)), len(stream)]
    relay = EventRelay()
    passed = [relay.feed(stream[start:end]) for start, end in pairwise(edges)]
    assert b"".join(passed) == b"".join(EVENTS)
    assert all(piece == b"" or piece.endswith(b"\n\n") for piece in passed)
    assert (relay.usage, relay.rest) == (Usage(7, 3, 2), b"")


def test_the_beginning_of_an_event_is_kept_until_it_ends() -> None:
    relay = EventRelay()
    assert relay.feed(b"data: 1\n\ndata: ") == b"data: 1\n\n"
    assert relay.rest == b"data: "
    assert relay.feed(b"2\n\n") == b"data: 2\n\n"


def test_an_event_without_an_end_is_not_kept_for_ever() -> None:
    relay = EventRelay()
    sent = sum(len(relay.feed(bytes(2**16))) for _ in range(64))
    assert sent >= 2**21
