"""Stream a chat from a running server with the official client.

pip install openai; python examples/stream_with_openai.py "Why is the sky blue?"
"""

import os
import sys

from openai import OpenAI


def main() -> None:
    url = os.environ.get("TIDEGATE_URL", "http://127.0.0.1:8000")
    question = " ".join(sys.argv[1:]) or "Name three rivers of Europe."
    client = OpenAI(base_url=f"{url}/v1", api_key="not needed")
    stream = client.chat.completions.create(
        model="smollm2-135m",
        messages=[{"role": "user", "content": question}],
        max_tokens=128,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    for chunk in stream:
        if chunk.choices:
            print(chunk.choices[0].delta.content or "", end="", flush=True)
        elif chunk.usage is not None:
            print(f"\n[{chunk.usage.prompt_tokens} tokens in, {chunk.usage.completion_tokens} out]")


if __name__ == "__main__":
    main()
