"""What the model is given, column by column, is what laying the tokens down one by one would give."""

from hypothesis import given
from hypothesis import strategies as st

from llmservice_server.engine.plan import Scheduled
from llmservice_server.engine.request import Request, new_block_table
from llmservice_server.engine.step_input import StepInput
from llmservice_server.messages import Generate, SamplingParams


def request(num_tokens: int) -> Request:
    message = Generate(
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
    return Scheduled(request(num_known), start, num_tokens, samples, draw(st.sampled_from([0, 0, 0, 2])))


@given(st.lists(shares(), min_size=1, max_size=6))
def test_the_columns_are_the_shares_laid_end_to_end(scheduled: list[Scheduled]) -> None:
    tokens, positions, last_rows = [], [], []
    for share in scheduled:
        end = share.start + share.num_tokens
        tokens += [*share.request.token_ids[share.start : end], *[0] * share.num_padding]
        positions += range(share.start, end + share.num_padding)
        if share.samples:
            last_rows.append(len(tokens) - share.num_padding - 1)
    step = StepInput.of(scheduled)
    assert step.token_ids.tolist() == tokens
    assert step.positions.tolist() == positions
    assert list(step.sampling) == [share.request for share in scheduled if share.samples]
    assert (list(range(len(tokens))) if step.last_rows is None else step.last_rows.tolist()) == last_rows
    counts = [share.num_tokens + share.num_padding for share in scheduled]
    assert [(part.start, part.num_tokens) for part in step.slices] == list(
        zip([share.start for share in scheduled], counts, strict=True)
    )
    assert [part.block_table for part in step.slices] == [share.request.block_table for share in scheduled]


def test_a_finished_member_of_a_static_batch_is_padding_and_samples_nothing() -> None:
    step = StepInput.of([Scheduled(request(3), 2, 0, False, 1), Scheduled(request(4), 3, 1, True)])
    assert step.token_ids.tolist() == [0, 103]
    assert step.positions.tolist() == [2, 3]
    assert step.last_rows is not None
    assert step.last_rows.tolist() == [1]
