import pytest
import torch

from llmservice_server.backend.cuda.backend import why_unusable
from llmservice_server.backend.cuda.kernels import sampling
from llmservice_server.backend.torch import sampler as by_torch

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
BOTH = pytest.mark.parametrize("by", [sampling, by_torch], ids=["kernel", "torch"])


def wanted_of(*numbers: float) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def random_weights(num_rows: int, size: int, spread: float) -> torch.Tensor:
    """Every other row has ties, as logits in bfloat16 have."""
    logits = spread * torch.randn(num_rows, size, generator=torch.Generator().manual_seed(size))
    logits[1::2] = logits[1::2].mul(4).round().div(4)
    return (logits - logits.amax(dim=-1, keepdim=True)).exp()


@pytest.mark.parametrize("size", [1, 50, 5000])
def test_the_kernels_keep_and_draw_what_torch_does(size: int) -> None:
    assert why_unusable(sampling.top_k_top_p, sampling.invert, size, CPU) is None


@pytest.mark.parametrize("num_rows", [1, 2, 24])
@pytest.mark.parametrize("size", [1, 50, 5000])
def test_any_number_of_rows_agrees_with_torch(num_rows: int, size: int) -> None:
    weights = random_weights(num_rows, size, 3.0)
    uniforms = torch.linspace(0.01, 0.999, num_rows, dtype=torch.float64)
    masses = weights.sum(dim=-1, dtype=torch.float64) * uniforms.flip(0)
    for wanted, by_mass in ((masses, True), ((uniforms * size).ceil(), False)):
        kept = sampling.top_k_top_p(weights.clone(), wanted, by_mass)
        assert torch.equal(kept, by_torch.top_k_top_p(weights, wanted, by_mass))
        assert torch.equal(sampling.invert(kept, uniforms), by_torch.invert(kept, uniforms))


@pytest.mark.parametrize("by_mass", [False, True])
def test_the_number_of_programs_does_not_change_the_mask(monkeypatch: pytest.MonkeyPatch, by_mass: bool) -> None:
    weights = random_weights(2, 20_000, 1.0)
    wanted = weights.sum(dim=-1, dtype=torch.float64) * 0.8 if by_mass else wanted_of(50, 3001)
    expected = by_torch.top_k_top_p(weights, wanted, by_mass)
    for programs in (1, 4, 6, 1024):  # slices of 5, 3, 2 and 1 tiles
        monkeypatch.setattr(sampling, "_PROGRAMS", programs)
        assert torch.equal(sampling.top_k_top_p(weights.clone(), wanted, by_mass), expected)


@pytest.mark.parametrize("by_mass", [False, True])
@BOTH
def test_of_equal_weights_the_first_stay(by, by_mass: bool) -> None:  # type: ignore[no-untyped-def]
    weights = torch.tensor([[0.5, 1.0, 0.5, 0.25, 0.5], [0.0, 1.0, 0.0, 0.0, 1.0]])
    left = by.top_k_top_p(weights, wanted_of(2, 5), by_mass)
    stays = [0.5, 1.0, 0.5 if by_mass else 0.0, 0.0, 0.0]
    assert left.tolist() == [stays, [0.0, 1.0, 0.0, 0.0, 1.0]]


@pytest.mark.parametrize("by_mass", [False, True])
def test_ties_are_counted_across_programs(by_mass: bool) -> None:
    left = sampling.top_k_top_p(torch.ones(1, 10_000), wanted_of(8200), by_mass)
    assert torch.equal(left[0], (torch.arange(10_000) < 8200).float())


@BOTH
def test_a_draw_is_the_first_index_whose_cumulative_weight_exceeds_the_share(by) -> None:  # type: ignore[no-untyped-def]
    row = torch.zeros(9000)
    row[[3, 4096, 8999]] = torch.tensor([0.25, 1.0, 0.75])
    uniforms = wanted_of(0.0, 0.124, 0.125, 0.624, 0.625, 1 - 2**-53)
    assert by.invert(row.repeat(6, 1), uniforms).tolist() == [3, 3, 4096, 4096, 8999, 8999]


@BOTH
def test_a_draw_never_has_weight_zero(by) -> None:  # type: ignore[no-untyped-def]
    weights = by_torch.top_k_top_p(random_weights(16, 5000, 8.0), torch.full((16,), 4.0, dtype=torch.float64), False)
    for uniform in (0.0, 0.7, 1 - 2**-53):
        drawn = by.invert(weights, torch.full((16,), uniform, dtype=torch.float64))
        assert weights.gather(1, drawn[:, None]).min() > 0


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # NumPy's; a GPU has none
def test_a_row_with_nan_does_not_change_the_others() -> None:
    weights = random_weights(3, 50, 2.0)
    uniforms = wanted_of(0.3, 0.5, 0.9)
    expected = by_torch.top_k_top_p(weights, uniforms, True)
    spoilt = weights.clone()
    spoilt[1] = torch.nan
    kept = sampling.top_k_top_p(spoilt, uniforms, True)
    drawn = sampling.invert(kept, uniforms)
    assert torch.equal(kept[::2], expected[::2])
    assert torch.equal(drawn[::2], by_torch.invert(expected, uniforms)[::2])
    assert 0 <= drawn[1] < 50


def test_kernels_that_differ_or_raise_are_unusable() -> None:
    def one_less(weights: torch.Tensor, wanted: torch.Tensor, by_mass: bool) -> torch.Tensor:
        return by_torch.top_k_top_p(weights, wanted * 0.9, by_mass)

    def raises(weights: torch.Tensor, wanted: torch.Tensor, by_mass: bool) -> torch.Tensor:
        raise RuntimeError("no kernel image is available\nand more")

    def the_next(weights: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
        return by_torch.invert(weights, uniforms) + 1

    differ = "their results differ from torch's"
    assert why_unusable(one_less, by_torch.invert, 500, CPU) == differ
    assert why_unusable(by_torch.top_k_top_p, the_next, 500, CPU) == differ
    assert why_unusable(raises, by_torch.invert, 500, CPU) == "RuntimeError: no kernel image is available"
