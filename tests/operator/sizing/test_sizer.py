from __future__ import annotations

from typing import Any

from llmservice_operator.api.model_spec import ModelSource
from llmservice_operator.models.location import ModelSourceError
from llmservice_operator.models.source import Figures, Model
from llmservice_operator.sizing.sizer import Sizer
from llmservice_operator.sizing.sizing import Sized, SizingProblem

NOW = 1000.0


class Reader:
    """Gives the model, or raises what it is told to; counts how often it is asked."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.error: ModelSourceError | None = None
        self.asked = 0

    async def read(self, source: ModelSource, known: Figures | None) -> Model:
        self.asked += 1
        if self.error:
            raise self.error
        return self.model


async def test_a_model_is_read_once_until_the_spec_changes(service_of: Any, model: Model) -> None:
    reader = Reader(model)
    sizer = Sizer(reader.read)

    for seconds in range(0, 500, 5):
        await sizer.size(service_of().spec, NOW + seconds)
    assert reader.asked == 1

    changed = await sizer.size(service_of(engine={"maxNumSeqs": 3}).spec, NOW + 501)
    assert isinstance(changed, Sized)
    assert (reader.asked, changed.plan.max_num_seqs) == (2, 3)


async def test_scaling_alone_reads_nothing_anew(service_of: Any, model: Model) -> None:
    reader = Reader(model)
    sizer = Sizer(reader.read)

    await sizer.size(service_of(replicas=1).spec, NOW)
    await sizer.size(service_of(replicas=5).spec, NOW + 1)

    assert reader.asked == 1


async def test_a_failure_is_told_and_tried_again_soon(service_of: Any, model: Model) -> None:
    reader = Reader(model)
    reader.error = ModelSourceError("ModelUnreachable", "down", lasting=False)
    sizer = Sizer(reader.read)

    assert isinstance(await sizer.size(service_of().spec, NOW), SizingProblem)
    await sizer.size(service_of().spec, NOW + 5)
    assert reader.asked == 1

    reader.error = None
    assert isinstance(await sizer.size(service_of().spec, NOW + 16), Sized)


async def test_a_hub_that_is_down_later_takes_nothing_away(service_of: Any, model: Model) -> None:
    reader = Reader(model)
    sizer = Sizer(reader.read)
    await sizer.size(service_of().spec, NOW)
    reader.error = ModelSourceError("ModelUnreachable", "down", lasting=False)

    later = await sizer.size(service_of().spec, NOW + 10_000)

    assert reader.asked == 2
    assert isinstance(later, Sized)


async def test_a_model_that_became_unreadable_is_told(service_of: Any, model: Model) -> None:
    reader = Reader(model)
    sizer = Sizer(reader.read)
    await sizer.size(service_of().spec, NOW)
    reader.error = ModelSourceError("ModelUnreadable", "a shard is missing")

    assert isinstance(await sizer.size(service_of().spec, NOW + 10_000), SizingProblem)
