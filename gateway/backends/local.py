"""Our own engine in this process, with the tokeniser and the chat template of its checkpoint."""

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import (
    AbstractAsyncContextManager,
    AsyncExitStack,
    aclosing,
    asynccontextmanager,
    contextmanager,
)
from pathlib import Path

import msgspec

from core import Engine, EngineDraining, EngineError, RequestTooLong, SamplingParams, read_checkpoint_metadata
from gateway.answer import AnswerText, Choice, EchoedPrompt, TokenStream, broken_off, joined, mixed
from gateway.backends import BackendHealth, Embeddings, Gauge
from gateway.config import ServerConfig
from gateway.errors import GenerationFailed, InvalidRequest
from gateway.events import Event, Usage
from gateway.generation import PromptEncoder, sampling_params
from gateway.request import GenerateRequest, Message, Prompt
from gateway.telemetry.engine_gauges import engine_gauges, region_gauges
from tokenization import (
    ChatTemplate,
    NoChatTemplate,
    Tokenizer,
    read_chat_template,
    tokenizer_from_folder,
    tokenizer_from_gguf,
)

MEMORY_EVERY_S = 5.0
"""The worker answers between two steps, so a scrape does not wait for it but shows the newest sample."""


class LocalBackend:
    """One engine, one model. Owned by the lifespan."""

    def __init__(
        self, engine: Engine, *, tokenizer: Tokenizer, template: ChatTemplate | None, model_id: str
    ) -> None:
        info = engine.info
        self._engine = engine
        self._tokenizer = tokenizer
        self._stop_token_ids = frozenset(tokenizer.eos_token_ids)
        self._model_id = model_id
        self._draining = False
        self._memory: dict[str, int] = {}
        self._regions: dict[str, int] = {}
        self._regions_text = ""
        self._num_compilations = 0
        # What the pool cannot hold is no context either.
        self._max_context_tokens = min(info.max_model_len, info.num_blocks * info.block_size)
        self._encoder = PromptEncoder(
            tokenizer, template, max_context_tokens=self._max_context_tokens, vocab_size=info.vocab_size
        )

    @property
    def fingerprint(self) -> str:
        return f"fp_{self._engine.info.namespace.hex()[-16:]}"

    def models(self) -> tuple[str, ...]:
        return (self._model_id,)

    def open(
        self, request: GenerateRequest, *, request_id: str
    ) -> AbstractAsyncContextManager[AsyncIterator[Event]]:
        return self._open(request, request_id=request_id)

    @asynccontextmanager
    async def _open(
        self, request: GenerateRequest, *, request_id: str
    ) -> AsyncIterator[AsyncIterator[Event]]:
        prompts = await self._encoder.encode(request)
        async with AsyncExitStack() as scopes:
            choices: list[Choice] = []
            streams: list[TokenStream] = []
            for index in range(request.num_choices):
                prompt, sibling = divmod(index, request.n)
                sampling = self._sampling(request, num_prompt_tokens=len(prompts[prompt]), sibling=sibling)
                stream = self._engine.generate(
                    request_id,
                    prompts[prompt],
                    sampling,
                    namespace=request.cache_namespace,
                    tenant=request.tenant,
                    session_id=request.session_id,
                )
                with _too_long_names("prompt" if request.prompts else "messages"):
                    streams.append(await scopes.enter_async_context(stream))
                choices.append(self._choice(request, prompts, index=index, sampling=sampling))
            events = [
                await scopes.enter_async_context(
                    aclosing(choice.events(stream, is_draining=lambda: self._draining))
                )
                for choice, stream in zip(choices, streams, strict=True)
            ]
            if len(events) == 1:
                yield events[0]
                return
            mixture = await scopes.enter_async_context(mixed(events))
            yield await scopes.enter_async_context(aclosing(joined(mixture, choices, n=request.n)))

    def _sampling(self, request: GenerateRequest, *, num_prompt_tokens: int, sibling: int) -> SamplingParams:
        return sampling_params(
            request,
            num_prompt_tokens=num_prompt_tokens,
            max_context_tokens=self._max_context_tokens,
            stop_token_ids=self._stop_token_ids,
            vocab_size=self._encoder.vocab_size,
            sibling=sibling,
        )

    def _choice(
        self,
        request: GenerateRequest,
        prompts: Sequence[Sequence[int]],
        *,
        index: int,
        sampling: SamplingParams,
    ) -> Choice:
        which = index // request.n
        echo = None
        if request.echo:
            prompt = request.prompts[which]
            text = prompt if isinstance(prompt, str) else None
            echo = EchoedPrompt(self._tokenizer, prompts[which], text=text)
        return Choice(
            AnswerText(self._tokenizer, stop=request.stop, continues_text=bool(request.prompts)),
            num_prompt_tokens=len(prompts[which]),
            stop_token_ids=frozenset(sampling.stop_token_ids),
            index=index,
            has_logprobs=request.num_logprobs is not None,
            echo=echo,
            max_tokens=request.max_tokens,
        )

    async def tokenize(self, text: str, *, add_special_tokens: bool) -> Sequence[int]:
        add_bos = None if add_special_tokens else False
        return await self._encoder.encode_text(text, param="prompt", add_bos=add_bos)

    async def tokenize_chat(
        self, messages: Sequence[Message], *, add_generation_prompt: bool
    ) -> Sequence[int]:
        return await self._encoder.encode_messages(messages, add_generation_prompt=add_generation_prompt)

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        return await self._encoder.decode(token_ids)

    async def apply_template(self, messages: Sequence[Message], *, add_generation_prompt: bool) -> str:
        return await self._encoder.render(messages, add_generation_prompt=add_generation_prompt)

    async def embed(self, prompts: Sequence[Prompt], *, request_id: str, tenant: str) -> Embeddings:
        # One after the other: a prompt of some length fills its steps by itself.
        encoded = await self._encoder.encode_prompts(prompts, param="input")
        vectors = []
        for token_ids in encoded:
            with _too_long_names("input"):
                vectors.append(await self._embed(request_id, token_ids, namespace=tenant.encode()))
        return Embeddings(vectors=tuple(vectors), num_prompt_tokens=sum(map(len, encoded)))

    async def _embed(
        self, request_id: str, token_ids: Sequence[int], *, namespace: bytes
    ) -> tuple[float, ...]:
        try:
            return tuple(await self._engine.embed(request_id, token_ids, namespace=namespace))
        except (RequestTooLong, EngineDraining):
            raise
        except EngineError as error:
            usage = Usage(num_prompt_tokens=len(token_ids))
            failed = broken_off(draining=self._draining, detail=str(error), usage=usage)
            raise GenerationFailed(failed) from None

    def health(self) -> BackendHealth:
        health = self._engine.health()
        return BackendHealth(
            alive=health.alive,
            ready=health.alive and health.accepting and health.stalled is None,
            detail=health.reason or health.stalled or self._regions_text,
        )

    async def drain(self, *, deadline_s: float) -> None:
        self._draining = True
        await self._engine.drain(deadline_s)

    async def watch_memory(self) -> None:
        """Sample the worker's memory for ever."""
        while True:
            memory = await self._engine.memory()
            self._memory = {
                "rss": memory.rss_bytes,
                "pss": memory.pss_bytes,
                "anonymous": memory.anonymous_bytes,
                "file": memory.file_bytes,
            }
            regions = memory.regions
            self._regions_text = regions.describe()
            self._regions = {
                "compiled": regions.num_compiled,
                "eager": regions.num_eager,
                "next_start": regions.num_waiting,
            }
            self._num_compilations = regions.num_compilations
            await asyncio.sleep(MEMORY_EVERY_S)

    def gauges(self) -> tuple[Gauge, ...]:
        return (
            *engine_gauges(self._engine, memory=self._memory),
            *region_gauges(self._regions, num_compilations=self._num_compilations),
        )

    def explain(self, request_id: str) -> tuple[Mapping[str, object], ...]:
        return tuple(msgspec.structs.asdict(each) for each in self._engine.explain(request_id))

    def live_requests(self) -> tuple[Mapping[str, object], ...]:
        return tuple(msgspec.structs.asdict(each) for each in self._engine.live_requests())


@contextmanager
def _too_long_names(param: str) -> Iterator[None]:
    """The engine knows no field names: say which one was too long, the prompt or the answer asked for."""
    try:
        yield
    except RequestTooLong as error:
        room = error.limit - error.num_prompt_tokens
        if room <= 0:
            raise InvalidRequest(str(error), param=param, code=error.code) from None
        raise InvalidRequest(
            f"max_tokens is {error.max_tokens}; {error.limit_name} is {error.limit} and the prompt has "
            f"{error.num_prompt_tokens} tokens, so at most {room} are allowed",
            param="max_tokens",
            code=error.code,
        ) from None


def _load_text_side(checkpoint: str) -> tuple[Tokenizer, ChatTemplate | None]:
    folder = Path(checkpoint)
    tokenizer: Tokenizer
    metadata: Mapping[str, object] = read_checkpoint_metadata(checkpoint)
    if folder.is_dir():
        tokenizer, metadata = tokenizer_from_folder(folder), read_chat_template(folder)
    else:
        tokenizer = tokenizer_from_gguf(metadata)
    try:
        return tokenizer, ChatTemplate.from_gguf(metadata, tokenizer)
    except NoChatTemplate:
        return tokenizer, None  # plain prompts still work; a chat is refused by name


@asynccontextmanager
async def open_local_backend(config: ServerConfig) -> AsyncIterator[LocalBackend]:
    """Load model and tokeniser, and run the engine until the scope is left.

    Raises:
        EngineError, TokenizationError: the checkpoint or an option cannot be used.
    """
    tokenizer, template = await asyncio.to_thread(_load_text_side, config.engine.checkpoint)
    async with Engine.open(config.engine) as engine, asyncio.TaskGroup() as tasks:
        backend = LocalBackend(engine, tokenizer=tokenizer, template=template, model_id=config.model_id)
        memory = tasks.create_task(backend.watch_memory())
        yield backend
        memory.cancel()
