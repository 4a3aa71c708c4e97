"""All that a request is given is the same alone and in company: tokens, log-probabilities, scores, sums.

The real scheduler over the real worker of a tiny checkpoint. Alone a prompt is computed in one piece
in an ample pool; in company it is chunked, shares cached prefixes, and is preempted.
"""

import random
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch

from core.cache.manager import KVCacheManager
from core.config import EngineConfig
from core.execution.answers import pool
from core.execution.worker import ModelWorker, load_worker
from core.request import Request, SamplingParams, TokenLogprob, TokenOutput
from core.scheduler.plan import BlockCopy, PromptScoring, StepPlan
from core.scheduler.scheduler import Scheduler
from tests.fakes.plans import planned, step
from tests.fakes.tiny_llama import TinyShape, write_tiny_llama

VOCAB_SIZE = 320
NUM_BLOCKS = 200
BLOCK_SIZE = 16


@dataclass(frozen=True)
class Asked:
    """A request before it is one."""

    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    pools: bool = False

    def request(self, name: str) -> Request:
        return Request(
            request_id=name,
            token_ids=array("i", self.prompt_ids),
            num_prompt_tokens=len(self.prompt_ids),
            sampling=self.sampling,
            pools=self.pools,
        )


@dataclass
class Given:
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    pooled: bytes = b""

    def take(self, output: TokenOutput) -> None:
        assert output.error is None
        self.token_ids += output.token_ids
        self.logprobs += output.logprobs
        self.prompt_logprobs += output.prompt_logprobs
        self.pooled += output.pooled


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> ModelWorker:
    shape = TinyShape(linear_type="Q4_1", embedding_type="Q8_0", vocab_size=VOCAB_SIZE, hidden_width=160)
    path = write_tiny_llama(tmp_path_factory.mktemp("tiny") / "tiny.gguf", shape)
    return load_worker(EngineConfig(checkpoint=str(path), num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE))


def serve(
    worker: ModelWorker, asked: Sequence[Asked], *, num_blocks: int, max_prefill_tokens: int
) -> tuple[list[Given], Scheduler]:
    scheduler = Scheduler(
        KVCacheManager(num_blocks, BLOCK_SIZE),
        max_step_tokens=max(max_prefill_tokens, 48),
        max_prefill_tokens=max_prefill_tokens,
        max_running=16,
        max_model_len=1024,
    )
    given = {str(number): Given() for number in range(len(asked))}
    for number, each in enumerate(asked):
        scheduler.add(each.request(str(number)))
    while (plan := scheduler.schedule()) is not None:
        for output in scheduler.update(plan, worker.execute(plan)):
            given[output.request_id].take(output)
        scheduler.check()
    return list(given.values()), scheduler


def random_asked(rng: random.Random) -> Asked:
    prefix = [7, 8, 9] * 20
    prompt_ids = prefix[: rng.choice((0, 0, 30, 60))] + [
        rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 24))
    ]
    if rng.random() < 0.2:
        return Asked(tuple(prompt_ids), SamplingParams(max_tokens=0, seed=0), pools=True)
    sampling = SamplingParams(
        max_tokens=rng.randint(4, 60),
        temperature=rng.choice((0.0, 0.8, 1.5)),
        top_p=rng.choice((1.0, 0.9)),
        top_k=rng.choice((0, 20)),
        min_p=rng.choice((0.0, 0.02)),
        typical_p=rng.choice((1.0, 0.9)),
        seed=rng.randrange(1 << 40),
        repetition_penalty=rng.choice((1.0, 1.3)),
        presence_penalty=rng.choice((0.0, 0.6)),
        frequency_penalty=rng.choice((0.0, 0.3)),
        logit_bias=rng.choice(((), ((3, 4.0), (5, -100.0)))),
        min_tokens=rng.choice((0, 6)),
        stop_token_ids=tuple(rng.sample(range(VOCAB_SIZE), 3)),
        num_logprobs=rng.choice((None, 0, 4)),
        prompt_logprobs=rng.choice((None, None, 3)),
    )
    return Asked(tuple(prompt_ids), sampling)


def test_everything_given_is_the_same_alone_and_in_company(worker: ModelWorker, search_factor: int) -> None:
    num_preemptions = num_hit_tokens = num_copied_tokens = 0
    for round_number in range(4 * search_factor):
        rng = random.Random(round_number)
        asked = [random_asked(rng) for _ in range(rng.randint(8, 14))]
        together, scheduler = serve(
            worker, asked, num_blocks=rng.randint(9, 11), max_prefill_tokens=rng.choice((5, 16, 48))
        )
        for number, each in enumerate(asked):
            (alone,), _ = serve(worker, [each], num_blocks=NUM_BLOCKS, max_prefill_tokens=512)
            assert together[number] == alone, f"request {number} of {len(asked)}, round {round_number}"
        num_preemptions += scheduler.stats().num_preemptions
        num_hit_tokens += scheduler.stats().num_hit_tokens
        num_copied_tokens += scheduler.stats().num_hit_tokens % BLOCK_SIZE
    assert num_preemptions > 0, "the pool was too large to test anything"
    assert num_hit_tokens > 0
    assert num_copied_tokens > 0, "no prompt parted from another inside a block"


@pytest.mark.parametrize("num_common", [1, 15, 17, 40])
def test_rows_copied_from_anothers_block_give_the_same_bits_as_computed_ones(
    worker: ModelWorker, num_common: int
) -> None:
    prompt_ids = [random.Random(6).randrange(VOCAB_SIZE) for _ in range(64)]
    other = [*prompt_ids[:num_common], *((token_id + 1) % VOCAB_SIZE for token_id in prompt_ids[num_common:])]
    worker.runner.logits(step(planned("first", other, blocks=range(4))))
    copied = BlockCopy(source=num_common // BLOCK_SIZE, target=7, num_tokens=num_common % BLOCK_SIZE)
    blocks = [*range(num_common // BLOCK_SIZE), 7, 8, 9, 10, 11][:4]
    rest = planned("second", prompt_ids[num_common:], first_position=num_common, blocks=blocks)
    logits_V = worker.runner.logits(StepPlan(step_id=2, items=(rest,), block_copies=(copied,)))
    alone_V = worker.runner.logits(step(planned("alone", prompt_ids, blocks=range(12, 16))))
    assert torch.equal(logits_V, alone_V)


def test_a_second_time_over_a_warm_cache_gives_the_same(worker: ModelWorker) -> None:
    """Penalties look back on tokens, not on what happened to be computed."""
    sampling = SamplingParams(
        max_tokens=12, temperature=0.0, seed=0, repetition_penalty=1.5, num_logprobs=2, prompt_logprobs=2
    )
    asked = Asked(tuple(range(100)), sampling)
    (first, second), scheduler = serve(worker, [asked] * 2, num_blocks=NUM_BLOCKS, max_prefill_tokens=7)
    assert first == second
    assert len(first.prompt_logprobs) == 99
    assert scheduler.stats().num_hit_tokens == 0, "scored prompts are computed in full"


def test_penalties_change_what_a_model_says(worker: ModelWorker) -> None:
    """Else the tests above would compare nothing."""
    prompt_ids = tuple([11, 12] * 20)

    def answer(**options: float) -> tuple[int, ...]:
        sampling = SamplingParams(max_tokens=20, temperature=0.0, seed=0, **options)  # type: ignore[arg-type]
        (given,), _ = serve(
            worker, [Asked(prompt_ids, sampling)], num_blocks=NUM_BLOCKS, max_prefill_tokens=64
        )
        return given.token_ids

    answers = [answer(), answer(repetition_penalty=3.0), answer(frequency_penalty=2.0)]
    assert len(set(answers)) == 3
    assert len(set(answer(presence_penalty=100.0))) == 20


def test_scores_are_the_log_softmax_of_the_rows_before(worker: ModelWorker) -> None:
    prompt_ids = [random.Random(4).randrange(VOCAB_SIZE) for _ in range(50)]
    whole = planned("a", prompt_ids, blocks=range(4), num_samples=50)
    exact_RV = torch.log_softmax(worker.runner.logits(step(whole)).double(), -1)
    scoring = PromptScoring(token_ids=tuple(prompt_ids[1:]), num_top=2)
    (answer,) = worker.execute(
        step(planned("a", prompt_ids, blocks=range(4), num_samples=0, scoring=scoring))
    ).samples
    assert answer.token_ids == ()
    for row, each in enumerate(answer.scored):
        assert each.token_id == prompt_ids[row + 1]
        assert each.logprob == pytest.approx(float(exact_RV[row, each.token_id]), abs=1e-5)
        assert [token_id for token_id, _ in each.top] == exact_RV[row].topk(2).indices.tolist()


def test_a_sum_is_that_of_the_final_hidden_states() -> None:
    rows_TE = torch.randn(30, 64, generator=torch.Generator().manual_seed(1))
    total = pool(rows_TE, b"")
    torch.testing.assert_close(
        torch.tensor(array("d", total), dtype=torch.float64), rows_TE.double().sum(0), rtol=1e-12, atol=1e-12
    )
    for cut in (1, 13, 29):
        assert pool(rows_TE[cut:], pool(rows_TE[:cut], b"")) == total


def test_a_scored_row_that_is_no_number_ends_its_request_alone(worker: ModelWorker) -> None:
    embedding = worker.runner._model.embed_tokens  # type: ignore[attr-defined]
    spoil = embedding.register_forward_hook(
        lambda _module, ids, out: torch.where(ids[0].unsqueeze(-1) == 1, float("nan"), out)
    )
    scoring = PromptScoring(token_ids=(1, 1), num_top=1)
    plan = step(
        planned("broken", [1, 1, 1], blocks=[0], num_samples=0, scoring=scoring),
        planned("sound", [2, 3], blocks=[1], num_samples=0, scoring=PromptScoring(token_ids=(3,), num_top=1)),
    )
    broken, sound = worker.execute(plan).samples
    spoil.remove()
    assert (broken.error, broken.scored) == ("the model gave no finite logit", ())
    assert sound.error is None
    assert len(sound.scored) == 1
