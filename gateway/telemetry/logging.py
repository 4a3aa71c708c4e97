"""structlog, set up once: a console for people, JSON lines for machines, both on stderr."""

import logging
import sys

import structlog

_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


def configure_logging(*, level: str, log_format: str) -> None:
    """Send everything to stderr. `log_format` is `console`, `json`, or `auto`: console on a terminal."""
    as_json = log_format == "json" or (log_format == "auto" and not sys.stderr.isatty())
    renderer: structlog.typing.Processor = (
        structlog.processors.JSONRenderer()
        if as_json
        # The default formatter prints every local variable: prompts among them, and slowly.
        else structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)
    )
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            *([structlog.processors.format_exc_info] if as_json else []),
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(_LEVELS[level]),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=False,
    )
    # aiohttp and asyncio use the standard library; their warnings go where ours go.
    logging.basicConfig(
        level=max(_LEVELS[level], logging.WARNING), stream=sys.stderr, format="%(message)s", force=True
    )
