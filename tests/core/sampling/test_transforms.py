"""Each transform against a plain original that treats one row, in Python floats."""

import itertools
import math
import random

import pytest
import torch

from core.sampling.transforms import PARTIAL_K, draw, draw_nucleus, probabilities
from tests.gpu.devices import ON_EVERY_DEVICE

ALMOST_ONE = 1 - 2.0**-53


def softmax_original(logits: list[float], temperature: float) -> list[float]:
    highest = max(logits)
    weights = [math.exp((logit - highest) / temperature) for logit in logits]
    return [weight / sum(weights) for weight in weights]


def draw_original(weights: list[float], uniform: float) -> int:
    """The first id whose share of the line is passed; the last possible one where rounding leaves none."""
    sums = list(itertools.accumulate(weights))
    beyond = (place for place, value in enumerate(sums) if value > uniform * sums[-1])
    return next(beyond, max(place for place, weight in enumerate(weights) if weight > 0))


def nucleus_original(weights: list[float], top_p: float, uniform: float) -> int:
    """Rank by probability, then id; keep the fewest that reach `top_p`; draw among them."""
    ranked = sorted(range(len(weights)), key=lambda token_id: (-weights[token_id], token_id))
    nucleus: list[int] = []
    reached = 0.0
    for token_id in ranked:
        if nucleus and reached >= top_p:
            break
        nucleus.append(token_id)
        reached += weights[token_id]
    return nucleus[draw_original([weights[token_id] for token_id in nucleus], uniform)]


def one_nucleus(weights: list[float], top_p: float, uniforms: list[float], device: str = "cpu") -> list[int]:
    """The same row once per uniform number, in one batch."""
    rows = torch.tensor([weights], device=device).repeat(len(uniforms), 1)
    top_p_R = torch.full((len(uniforms),), top_p, dtype=torch.float64, device=device)
    return draw_nucleus(rows, top_p_R, torch.tensor(uniforms, dtype=torch.float64, device=device)).tolist()


def one_draw(weights: list[float], uniforms: list[float], device: str = "cpu") -> list[int]:
    rows = torch.tensor([weights], device=device).repeat(len(uniforms), 1)
    return draw(rows, torch.tensor(uniforms, dtype=torch.float64, device=device)).tolist()


@ON_EVERY_DEVICE
@pytest.mark.parametrize("temperature", [0.05, 0.7, 1.0, 2.0, 100.0])
def test_probabilities_are_the_softmax_of_the_scaled_logits(temperature, device):
    rng = random.Random(1)
    logits = [[rng.gauss(0, 6) for _ in range(200)] for _ in range(3)]
    exact = torch.tensor([softmax_original(row, temperature) for row in logits], dtype=torch.float64)
    logits_RV = torch.tensor(logits, device=device)
    ours = probabilities(logits_RV, torch.full((3,), temperature, device=device)).double().cpu()
    # float32 logits over a small temperature: an exponent of 1000 carries an error of 1e-4
    torch.testing.assert_close(ours, exact, rtol=2e-5 / min(temperature, 1), atol=1e-9)


@ON_EVERY_DEVICE
@pytest.mark.parametrize("temperature", [1e-6, 1e-30, 1e-44, 1e-60, 5e-324])
def test_a_tiny_temperature_is_greedy_and_overflows_nothing(temperature, device):
    logits_RV = torch.tensor([[3.0, 1e4, -1e4, 9999.0], [-3e38, 3e38, 0.0, 1.0]], device=device)
    temperature_R = torch.full((2,), temperature, dtype=torch.float64, device=device)
    assert probabilities(logits_RV, temperature_R).tolist() == [[0.0, 1.0, 0.0, 0.0]] * 2
    assert probabilities(logits_RV, temperature_R.float()).tolist() == [[0.0, 1.0, 0.0, 0.0]] * 2


@ON_EVERY_DEVICE
def test_rows_have_temperatures_of_their_own(device):
    logits_RV = torch.tensor([[0.0, 1.0], [0.0, 1.0]], device=device)
    ours = probabilities(logits_RV, torch.tensor([1.0, 0.5], device=device))
    assert ours[:, 1].tolist() == pytest.approx([1 / (1 + math.exp(-1)), 1 / (1 + math.exp(-2))], rel=1e-6)


@ON_EVERY_DEVICE
@pytest.mark.parametrize("vocab_size", [1, 2, 50, PARTIAL_K, PARTIAL_K + 1, 5000])
def test_drawing_equals_the_original(vocab_size, device):
    rng = random.Random(vocab_size)
    weights = [rng.random() ** 8 * (rng.random() < 0.7) for _ in range(vocab_size - 1)] + [0.25]
    weights = torch.tensor(weights).tolist()  # as float32 holds them
    uniforms = [0.0, ALMOST_ONE, *(rng.random() for _ in range(100))]
    assert one_draw(weights, uniforms, device) == [draw_original(weights, u) for u in uniforms]


@ON_EVERY_DEVICE
def test_each_token_has_its_share_of_the_line_in_the_order_of_ids(device):
    weights = [0.0, 0.25, 0.0, 0.5, 0.25, 0.0]
    uniforms = [0.0, 0.25 - 1e-12, 0.25, 0.75 - 1e-12, 0.75, ALMOST_ONE]
    assert one_draw(weights, uniforms, device) == [1, 1, 3, 3, 4, 4]


@ON_EVERY_DEVICE
def test_a_token_of_probability_zero_is_never_drawn(device):
    rng = random.Random(3)
    for zeros in ([0], [9], [0, 1, 2, 8, 9], [1, 3, 5, 7], list(range(9)), list(range(1, 10))):
        weights = [0.0 if token_id in zeros else rng.random() for token_id in range(10)]
        uniforms = [0.0, ALMOST_ONE, *(rng.random() for _ in range(300))]
        assert not set(zeros) & set(one_draw(weights, uniforms, device))
        assert not set(zeros) & set(one_nucleus(weights, 0.99999, uniforms, device))


@ON_EVERY_DEVICE
@pytest.mark.parametrize("vocab_size", [1, 3, 50, PARTIAL_K - 1, PARTIAL_K, PARTIAL_K + 1, 4000])
@pytest.mark.parametrize("spread", [0.01, 1.0, 12.0])
def test_a_nucleus_equals_the_original(vocab_size, spread, device):
    """Flat rows need more than `PARTIAL_K` candidates, steep ones a few."""
    rng = random.Random(f"{vocab_size}/{spread}")
    for top_p in (1e-9, 0.1, 0.5, 0.9, 0.999, 1 - 1e-12):
        logits = torch.tensor([[rng.gauss(0, spread) for _ in range(vocab_size)]])
        weights = probabilities(logits, torch.ones(1))[0].tolist()
        uniforms = [0.0, ALMOST_ONE, *(rng.random() for _ in range(6))]
        expected = [nucleus_original(weights, top_p, u) for u in uniforms]
        assert one_nucleus(weights, top_p, uniforms, device) == expected, top_p


@ON_EVERY_DEVICE
def test_rows_have_nuclei_of_their_own_whatever_their_size(device):
    """Narrow and wide rows in one batch take different ways and give what each gives alone."""
    rng = random.Random(4)
    rows = torch.randn(40, 3000, generator=torch.Generator().manual_seed(4))
    rows = torch.softmax(rows * torch.rand(40, 1, generator=torch.Generator().manual_seed(5)) * 8, -1).to(
        device
    )
    top_p_R = torch.tensor([rng.random() for _ in range(40)], dtype=torch.float64, device=device)
    uniform_R = torch.tensor([rng.random() for _ in range(40)], dtype=torch.float64, device=device)
    together = draw_nucleus(rows, top_p_R, uniform_R).tolist()
    alone = [
        draw_nucleus(rows[i : i + 1], top_p_R[i : i + 1], uniform_R[i : i + 1]).item() for i in range(40)
    ]
    assert together == alone


SWEEP = [i / 1000 for i in range(1000)] + [ALMOST_ONE]


@ON_EVERY_DEVICE
@pytest.mark.parametrize(
    ("top_p", "nucleus"),
    [
        (0.5, {2}),  # reached exactly: nothing more is needed
        (0.5 + 1e-9, {2, 0}),
        (0.75, {2, 0}),
        (0.75 + 1e-9, {2, 0, 1}),
        (0.875 - 1e-9, {2, 0, 1}),
        (0.875, {2, 0, 1}),
        (0.875 + 1e-9, {2, 0, 1, 3}),
        (1e-300, {2}),  # at least one
        (0.0, {2}),
    ],
)
def test_a_nucleus_is_the_fewest_tokens_that_reach_top_p(top_p, nucleus, device):
    """Of two equal tokens the one with the lower id comes first."""
    assert set(one_nucleus([0.25, 0.125, 0.5, 0.125], top_p, SWEEP, device)) == nucleus


@ON_EVERY_DEVICE
@pytest.mark.parametrize(("top_p", "count"), [(0.125, 512), (0.25, 1024), (0.5, 2048), (0.125 + 1e-9, 513)])
def test_among_equals_the_lowest_ids_win_however_many_there_are(top_p, count, device):
    """4,096 equal tokens, exact in binary: the partial search must not pick its own favourites."""
    weights = [2.0**-12] * 4096
    drawn = one_nucleus(weights, top_p, [i / count for i in range(count)] + [ALMOST_ONE], device)
    assert drawn == [*range(count), count - 1]


@ON_EVERY_DEVICE
def test_equals_at_the_last_candidates_rank_are_taken_in_the_order_of_ids(device):
    """900 likely tokens, then 3,000 equal ones: the nucleus ends inside the equals, at a known id."""
    weights = [2.0**-13] * 1500 + [2.0**-11] * 900 + [2.0**-13] * 1500
    top_p = 900 * 2.0**-11 + 300 * 2.0**-13
    drawn = set(one_nucleus(weights, top_p, [i / 3900 for i in range(3900)] + [ALMOST_ONE], device))
    assert drawn == {*range(300), *range(1500, 2400)}
