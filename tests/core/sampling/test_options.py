"""All options at once, in one batch: the order they work in, and rows that do not see each other."""

import random
from array import array

import pytest
import torch

from core.request import SamplingParams
from core.sampling.sampler import sample_rows, uniform
from core.scheduler.plan import PlannedTokens, TokenHistory
from tests.core.sampling.test_adjustments import adjusted_original
from tests.core.sampling.test_filters import highest_original, typical_original
from tests.core.sampling.test_transforms import draw_original, nucleus_original, softmax_original
from tests.fakes.plans import planned
from tests.gpu.devices import ON_EVERY_DEVICE

NEVER = -float("inf")


def item(name: str, params: SamplingParams, prompt_ids: list[int], output_ids: list[int]) -> PlannedTokens:
    known = [*prompt_ids, *output_ids]
    history = TokenHistory(num_prompt_tokens=len(prompt_ids), token_ids=array("i", known).tobytes())
    needs_history = params.looks_back or len(output_ids) < params.min_tokens
    return planned(
        name,
        known[-1:],
        first_position=len(known) - 1,
        blocks=[0],
        sampling=params,
        history=history if needs_history else None,
    )


def random_case(
    rng: random.Random, vocab_size: int, **fixed: float
) -> tuple[SamplingParams, list[int], list[int]]:
    options: dict[str, object] = {
        "temperature": rng.choice((0.0, 0.5, 1.0, 1.6)),
        "top_p": rng.choice((1.0, 0.95, 0.5)),
        "top_k": rng.choice((0, 0, 1, 5, 40, 10**6)),
        "min_p": rng.choice((0.0, 0.0, 0.05, 0.3)),
        "typical_p": rng.choice((1.0, 1.0, 0.9, 0.3)),
        "repetition_penalty": rng.choice((1.0, 1.2)),
        "presence_penalty": rng.choice((0.0, 0.8)),
        "frequency_penalty": rng.choice((0.0, -0.4)),
        "logit_bias": rng.choice(((), ((rng.randrange(vocab_size), 5.0),))),
        "min_tokens": rng.choice((0, 8)),
        "num_logprobs": rng.choice((None, None, 0, 5)),
        **fixed,
    }
    params = SamplingParams(
        max_tokens=99,
        seed=rng.randrange(2**63),
        stop_token_ids=(rng.randrange(vocab_size),),
        **options,  # type: ignore[arg-type]
    )
    tokens = [rng.randrange(vocab_size) for _ in range(30)]
    cut = rng.randint(1, 30)
    return params, tokens[:cut], tokens[cut:]


def token_original(
    logits: list[float], params: SamplingParams, prompt_ids: list[int], output_ids: list[int]
) -> int:
    """One row, in the documented order."""
    logits = adjusted_original(logits, params, prompt_ids, output_ids)
    if params.temperature == 0:
        return max(range(len(logits)), key=lambda token_id: (logits[token_id], -token_id))
    logits = [logit / params.temperature for logit in logits]
    if params.top_k:
        kept = highest_original(logits, params.top_k)
        logits = [logit if token_id in kept else NEVER for token_id, logit in enumerate(logits)]
    if params.typical_p < 1:
        possible = [token_id for token_id, logit in enumerate(logits) if logit > NEVER]
        kept, _ = typical_original([logits[token_id] for token_id in possible], params.typical_p)
        kept = {possible[place] for place in kept}
        logits = [logit if token_id in kept else NEVER for token_id, logit in enumerate(logits)]
    shares = softmax_original(logits, 1.0)
    number = uniform(params.seed or 0, len(prompt_ids) + len(output_ids))
    shares = [share if share >= params.min_p * max(shares) else 0.0 for share in shares]
    if params.top_p >= 1:
        return draw_original(shares, number)
    # What min-p took is the unlikely end of the ranking, so that the nucleus is the same or it is cut short.
    return nucleus_original(shares, params.top_p, number)


@pytest.mark.parametrize("seed", range(5))
def test_tokens_are_those_of_the_original_with_any_options(seed: int) -> None:
    """All but the few whose draw falls on a border that float32 puts elsewhere."""
    rng = random.Random(seed)
    cases = [random_case(rng, 200) for _ in range(120)]
    logits_RV = torch.randn(len(cases), 200, generator=torch.Generator().manual_seed(seed)) * 3
    samples = sample_rows(logits_RV, [item(str(row), *case) for row, case in enumerate(cases)])
    others = [
        row
        for row, (sample, case) in enumerate(zip(samples, cases, strict=True))
        if sample.token_ids != (token_original(logits_RV[row].tolist(), *case),)
    ]
    assert len(others) <= 1, [cases[row][0] for row in others]


@ON_EVERY_DEVICE
@pytest.mark.parametrize("vocab_size", [50, 3000])
def test_a_row_with_any_options_is_the_same_alone_and_in_company(vocab_size: int, device: str) -> None:
    rng = random.Random(vocab_size)
    for _ in range(6):
        cases = [random_case(rng, vocab_size) for _ in range(rng.randint(2, 12))]
        items = [item(str(row), *case) for row, case in enumerate(cases)]
        seed = rng.randrange(1 << 30)
        logits_RV = torch.randn(len(items), vocab_size, generator=torch.Generator().manual_seed(seed)) * 4
        logits_RV = logits_RV.to(device)
        alone = [sample_rows(logits_RV[row : row + 1], [one])[0] for row, one in enumerate(items)]
        assert sample_rows(logits_RV, items) == tuple(alone)
        order = rng.sample(range(len(items)), len(items))
        shuffled = sample_rows(logits_RV[order], [items[row] for row in order])
        assert list(shuffled) == [alone[row] for row in order]


def test_log_probabilities_are_the_models_own_whatever_the_options() -> None:
    logits_RV = torch.tensor([[0.0, 1.0, 3.0, 2.0]]).repeat(2, 1)
    before = logits_RV.clone()
    plain = SamplingParams(max_tokens=1, temperature=0.0, seed=0, num_logprobs=4)
    bent = SamplingParams(
        max_tokens=1, temperature=0.0, seed=0, num_logprobs=4, logit_bias=((0, 50.0),), repetition_penalty=9.0
    )
    first, second = sample_rows(logits_RV, [item("plain", plain, [2], []), item("bent", bent, [2], [])])
    assert (first.token_ids, second.token_ids) == ((2,), (0,))
    assert first.logprobs[0].top == second.logprobs[0].top
    assert second.logprobs[0].logprob == dict(first.logprobs[0].top)[0]
    assert torch.equal(logits_RV, before), "the caller's logits are not ours to change"


def test_a_greedy_row_pays_for_no_softmax(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> torch.Tensor:
        raise AssertionError("a softmax")

    monkeypatch.setattr(torch, "softmax", refuse)
    monkeypatch.setattr(torch, "log_softmax", refuse)
    rng = random.Random(1)
    cases = [random_case(rng, 100, temperature=0.0, num_logprobs=None) for _ in range(8)]  # type: ignore[arg-type]
    samples = sample_rows(torch.randn(8, 100), [item(str(row), *case) for row, case in enumerate(cases)])
    assert [sample.error for sample in samples] == [None] * 8


def test_penalised_and_plain_rows_may_come_and_go_in_any_order() -> None:
    rng = random.Random(2)
    logits_RV = torch.randn(6, 100, generator=torch.Generator().manual_seed(2))
    plain = [item(str(row), SamplingParams(max_tokens=9, temperature=0.0), [1, 2], [3]) for row in range(6)]
    bent = SamplingParams(max_tokens=9, temperature=0.0, repetition_penalty=5.0, frequency_penalty=2.0)
    best = logits_RV.argmax(-1).tolist()
    for count in range(7):
        rows = set(rng.sample(range(6), count))
        items = [
            item(str(row), bent, [best[row]], [best[row]]) if row in rows else plain[row] for row in range(6)
        ]
        for row, sample in enumerate(sample_rows(logits_RV, items)):
            assert (sample.token_ids == (best[row],)) == (row not in rows)


def test_options_that_leave_nothing_are_told_from_a_broken_model() -> None:
    everything = tuple(range(10))
    params = SamplingParams(max_tokens=9, temperature=0.0, min_tokens=5, stop_token_ids=everything)
    plain = SamplingParams(max_tokens=9, temperature=0.0)
    samples = sample_rows(torch.zeros(2, 10), [item("a", params, [1], []), item("b", plain, [1], [])])
    assert samples[0].error == "the options of this request leave no token to choose"
    assert samples[1].token_ids == (0,)
