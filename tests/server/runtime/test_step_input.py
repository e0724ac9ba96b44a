"""What the model is given, column by column, is what laying the tokens down one by one would give."""

from hypothesis import given
from hypothesis import strategies as st

from llmservice_server.engine.plan import Scheduled
from llmservice_server.engine.request import Request, new_block_table
from llmservice_server.runtime.runner import step_input
from llmservice_server.types.messages import GenerateRequest, SamplingParams


def request(num_tokens: int) -> Request:
    message = GenerateRequest(
        request_id="r",
        prompt_token_ids=list(range(100, 100 + num_tokens)),
        sampling=SamplingParams(max_tokens=1),
        arrival_s=0.0,
    )
    made = Request.of(message, 0, seed=0, eos_token_ids=frozenset())
    made.block_table = new_block_table([num_tokens])
    return made


@st.composite
def shares(draw: st.DrawFn) -> Scheduled:
    num_known = draw(st.integers(1, 9))
    start = draw(st.integers(0, num_known - 1))
    num_tokens = draw(st.integers(1, num_known - start))
    samples = start + num_tokens == num_known
    return Scheduled(request(num_known), start, num_tokens, samples)


@given(st.lists(shares(), min_size=1, max_size=6))
def test_the_columns_are_the_shares_laid_end_to_end(scheduled: list[Scheduled]) -> None:
    tokens, positions = [], []
    for share in scheduled:
        end = share.start + share.num_tokens
        tokens += share.request.token_ids[share.start : end]
        positions += range(share.start, end)
    step = step_input(scheduled)
    assert step.token_ids.tolist() == tokens
    assert step.positions.tolist() == positions
    assert step.starts.tolist() == [share.start for share in scheduled]
    assert step.counts.tolist() == [share.num_tokens for share in scheduled]
    assert list(step.block_tables) == [share.request.block_table for share in scheduled]
