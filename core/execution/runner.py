"""Computes one step: batch, forward, the rows that sample, and their next tokens."""

import time

import torch

from core.attention import AttentionBackend
from core.attention.kv_storage import KVStorage
from core.execution.answers import complete_answers
from core.execution.batch import build_batch, copy_blocks
from core.models import Model
from core.sampling.sampler import sample_rows
from core.scheduler.plan import SampledTokens, StepPlan, StepResult


class Runner:
    """A loaded model and its KV. Called from the worker's thread alone."""

    def __init__(
        self, model: Model, storage: KVStorage, attention: AttentionBackend, *, device: torch.device
    ) -> None:
        self._model, self._storage, self._attention, self._device = model, storage, attention, device

    @torch.inference_mode()
    def logits(self, plan: StepPlan) -> torch.Tensor:
        """Forward a plan and return the logits of its sampled rows, float32 `[R, V]`."""
        copy_blocks(plan, self._storage, device=self._device)
        batch = build_batch(plan, self._storage, self._attention, device=self._device)
        hidden_TE = self._model.forward(batch.token_ids_T, batch)
        return self._model.logits(hidden_TE.index_select(0, batch.sample_rows_R))

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        """Compute a step. One answer per planned item that asks for one."""
        started = time.perf_counter()
        copy_blocks(plan, self._storage, device=self._device)
        batch = build_batch(plan, self._storage, self._attention, device=self._device)
        built = time.perf_counter()
        hidden_TE = self._model.forward(batch.token_ids_T, batch)
        sampled = [item for item in plan.items if item.num_samples]
        samples: tuple[SampledTokens, ...] = ()
        forwarded = time.perf_counter()
        if sampled:
            logits_RV = self._model.logits(hidden_TE.index_select(0, batch.sample_rows_R))
            forwarded = time.perf_counter()
            samples = sample_rows(logits_RV, sampled)
        samples = complete_answers(plan.items, hidden_TE, samples, self._model.logits)
        return StepResult(
            step_id=plan.step_id,
            samples=samples,
            build_s=built - started,
            forward_s=forwarded - built,
            sample_s=time.perf_counter() - forwarded,
        )
