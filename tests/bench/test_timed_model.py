"""The engine whose steps take the time of a latency model."""

from pathlib import Path

from llmservice_planner.sizing.latency import LatencyModel
from llmservice_server.engine.config import EngineConfig
from llmservice_server.types.messages import GenerateRequest, SamplingParams
from pieces.timed_model import timed_engine

MODEL = LatencyModel(step_s=0.001, sequence_s=0.0, weights_s=0.02, token_s=0.001, kv_token_s=1e-5, pair_s=0.0)


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


def test_an_engines_steps_take_the_time_of_the_latency_model() -> None:
    clock = Clock()
    config = EngineConfig(model=Path("timed"), max_num_seqs=4, max_model_len=512)
    engine = timed_engine(config, MODEL, 65, [7, 9], 32, clock, clock.sleep)
    sampling = SamplingParams(max_tokens=3, temperature=0.0)
    prompt = list(range(30)) * 2
    engine.add(GenerateRequest(request_id="a", prompt_token_ids=prompt[:40], sampling=sampling, arrival_s=clock()))
    ends_s, tokens = [], []
    while engine.has_work:
        for output in engine.step().outputs:
            ends_s.append(round(clock() - 100, 6))
            tokens += output.token_ids
    prefill_s = 0.001 + 40 * 0.001  # of 40 tokens, whose arithmetic takes longer than reading the weights
    first_s, second_s = 0.021 + 41e-5, 0.021 + 42e-5
    assert ends_s == [round(prefill_s, 6), round(prefill_s + first_s, 6), round(prefill_s + first_s + second_s, 6)]
    assert tokens == [7, 9, 7]
