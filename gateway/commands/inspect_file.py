"""`tidegate inspect FILE`: what a checkpoint holds, and what of it fits here. Loads nothing."""

import math

import msgspec
import typer

from core import CheckpointSummary

SESSION_TOKENS = (4096, 8192, 32768)
BLOCK_TOKENS = 16


class Fit(msgspec.Struct, frozen=True, kw_only=True):
    """How many sessions of one length a KV pool holds."""

    tokens: int
    by_default: int
    """With the pool that `serve` takes when nobody says otherwise."""
    at_most: int
    """With all memory that is free now, less the weights."""
    within_context: bool


def inspect_file(path: str, *, as_json: bool) -> None:
    """Print a checkpoint's summary.

    Raises:
        CheckpointError: the file cannot be used.
    """
    summary = CheckpointSummary.read(path)
    fits = session_fits(summary)
    if as_json:
        document = {**msgspec.to_builtins(summary), "sessions": msgspec.to_builtins(fits)}
        typer.echo(msgspec.json.format(msgspec.json.encode(document), indent=2).decode())
    else:
        typer.echo("\n".join(_lines(summary, fits)))


def session_fits(summary: CheckpointSummary) -> tuple[Fit, ...]:
    """Nothing where the file does not say how large its KV is."""
    if summary.kv_bytes_per_token is None:
        return ()
    rest = max(0, summary.host.usable_bytes - summary.num_weight_bytes)
    return tuple(
        Fit(
            tokens=tokens,
            by_default=summary.host.default_kv_bytes // _session_bytes(summary.kv_bytes_per_token, tokens),
            at_most=rest // _session_bytes(summary.kv_bytes_per_token, tokens),
            within_context=summary.context_tokens is None or tokens <= summary.context_tokens,
        )
        for tokens in SESSION_TOKENS
    )


def _session_bytes(bytes_per_token: int, tokens: int) -> int:
    return math.ceil(tokens / BLOCK_TOKENS) * BLOCK_TOKENS * bytes_per_token


def size(num_bytes: float) -> str:
    """Bytes as people read them, in powers of 1024."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"


def _lines(summary: CheckpointSummary, fits: tuple[Fit, ...]) -> list[str]:
    tokenizer = summary.tokenizer
    served = "served here" if summary.is_supported else f"not served here: {', '.join(summary.supported)} are"
    lines = [
        _row("file", f"{_plain(summary.path)}, {size(summary.file_bytes)}"),
        _row("name", _plain(summary.name) or "none given"),
        _row("architecture", f"{_plain(summary.architecture) or 'none given'} ({served})"),
        _row("layers", f"{_known(summary.num_layers)}, width {_known(summary.width)}"),
        _row(
            "heads",
            f"{_known(summary.num_heads)} query, {_known(summary.num_kv_heads)} key/value, "
            f"width {_known(summary.head_dim)}",
        ),
        _row("context", f"{_known(summary.context_tokens)} tokens"),
        _row("tensors", f"{summary.num_tensors}, {summary.num_parameters / 1e6:.1f} million parameters"),
        *(
            _row(
                "",
                f"{name:6} {stored.num_tensors:4} tensors, {size(stored.num_bytes):>10}, "
                f"{8 * stored.num_bytes / stored.num_elements:.1f} bits per weight",
            )
            for name, stored in summary.types.items()
        ),
        _row(
            "tokenizer",
            f"{_plain(tokenizer.kind) or 'none given'}, {tokenizer.vocab_size} tokens"
            + (f", splits as {_plain(tokenizer.pre_tokenizer)}" if tokenizer.pre_tokenizer else ""),
        ),
        _row("template", "has a chat template" if tokenizer.has_chat_template else "no chat template"),
        _row("weights", size(summary.num_weight_bytes)),
    ]
    return lines + _kv_lines(summary, fits)


def _kv_lines(summary: CheckpointSummary, fits: tuple[Fit, ...]) -> list[str]:
    per_token = summary.kv_bytes_per_token
    if per_token is None:
        return [_row("KV", "the file does not say enough to tell its size")]
    host = summary.host
    equal = summary.num_weight_bytes // per_token
    longest = host.default_kv_bytes // per_token
    context = summary.context_tokens
    whole = "the whole context fits" if context and longest >= context else "less than the context"
    return [
        _row("KV", f"{size(per_token)} per token in float16; {equal} tokens weigh as much as the weights"),
        _row(
            "memory",
            f"{size(host.usable_bytes)} usable now, KV pool by default {size(host.default_kv_bytes)}",
        ),
        _row("fits", f"{longest} tokens by default ({whole})"),
        *(
            _row(
                "",
                f"{fit.tokens:6} tokens: {fit.by_default} sessions by default, {fit.at_most} at most"
                + ("" if fit.within_context else f" (longer than the context of {context})"),
            )
            for fit in fits
        ),
    ]


def _row(label: str, text: str) -> str:
    return f"{label:13} {text}"


def _known(number: int | None) -> str:
    return "unknown" if number is None else str(number)


def _plain(text: str) -> str:
    """A file's own words, made harmless for a terminal."""
    return "".join(c if c.isprintable() else "?" for c in text[:200])
