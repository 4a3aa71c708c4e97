"""Objects that OpenAI's endpoints share, whichever of them answers."""

from gateway.errors import ErrorReport
from gateway.events import Usage


def usage_object(usage: Usage) -> dict[str, object]:
    """The token counts of an answer."""
    return {
        "prompt_tokens": usage.num_prompt_tokens,
        "completion_tokens": usage.num_output_tokens,
        "total_tokens": usage.num_prompt_tokens + usage.num_output_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.num_cached_tokens},
    }


def error_object(report: ErrorReport) -> dict[str, object]:
    """A refusal's body, or the last event of a stream that broke off."""
    return {
        "error": {"message": report.message, "type": report.type, "param": report.param, "code": report.code}
    }
