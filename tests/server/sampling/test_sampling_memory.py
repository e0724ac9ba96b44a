"""What the sampler allocates on a GPU, counted on a CPU: the same torch operators, and every allocation of theirs."""

from collections.abc import Callable

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from llmservice_planner.sizing.overhead import LOGITS_BYTES, SUMMED_ROWS_BYTES
from llmservice_server.backend.sampling_batch import SamplingBatch
from llmservice_server.backend.torch import sampler as torch_sampler
from llmservice_server.sampling.logit_adjustments import apply_masks
from llmservice_server.sampling.sampler import Logprobs

VOCAB = 4096
HIDDEN = 8


def cut_in_place(weights: torch.Tensor, wanted: torch.Tensor, by_mass: bool) -> torch.Tensor:
    """Allocates what our kernel does on a GPU: nothing of the vocabulary's size."""
    return weights


def peak_bytes(work: Callable[[], object]) -> int:
    """The most that was allocated at a time while `work` ran, of what was not there before."""
    # acc_events: torch 2.11 warns of what it would forget between several cycles; here there is one
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as watched:
        work()
    kept = watched.profiler
    assert kept is not None
    assert kept.kineto_results is not None
    events = [event for event in kept.kineto_results.events() if event.name() == "[memory]"]
    now = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak


def sampling_bytes(batch: SamplingBatch) -> int:
    """From the states of a step's last tokens to its tokens."""
    hidden = torch.randn(len(batch.parameters), HIDDEN, dtype=torch.bfloat16)
    head = torch.randn(VOCAB, HIDDEN, dtype=torch.bfloat16)

    def work() -> None:
        with torch.inference_mode():
            logits = torch.nn.functional.linear(hidden, head).float()
            raw = logits.clone()
            token_ids = torch_sampler.choose(logits, batch, cut_in_place)
            Logprobs.of(raw, token_ids.clamp_min(0), 20)

    work()
    return peak_bytes(work)


@pytest.mark.parametrize("num_rows", [1, 2, 3, 16, 64, 128, 256, 300])
def test_the_widest_batch_fits_into_what_the_planner_sets_aside(num_rows: int) -> None:
    taken = sampling_bytes(SamplingBatch.largest(num_rows))
    planned = VOCAB * (num_rows * LOGITS_BYTES + SUMMED_ROWS_BYTES)
    assert taken <= planned
    if num_rows >= 64:
        assert taken > 0.75 * planned, "the planner sets too much aside"


def test_masks_of_grammars_take_no_more_however_many_rows_have_one() -> None:
    num_rows = 128
    logits = torch.zeros(num_rows, VOCAB)
    masks = torch.full((num_rows, VOCAB // 32), 0x5555, dtype=torch.int32)
    taken = peak_bytes(lambda: apply_masks(logits, range(num_rows), masks))
    assert 64 * VOCAB * 4 < taken <= VOCAB * SUMMED_ROWS_BYTES  # less than what sampling takes after it
    assert logits[:, :16].isinf().tolist() == [[False, True] * 8] * num_rows


@pytest.mark.parametrize("options", [{}, {"temperature": 1.0}, {"temperature": 0.7, "top_p": 0.5}])
def test_no_other_batch_takes_more_than_the_largest(options: dict[str, float]) -> None:
    assert sampling_bytes(SamplingBatch.identical(128, **options)) <= sampling_bytes(SamplingBatch.largest(128))
