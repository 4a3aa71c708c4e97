"""The mock as a process of its own: `python -m loadtest.mock [OPTIONS AS JSON] [PORT]`.

Prints its URL on the first line; ends on SIGTERM or SIGINT.
"""

import sys

import msgspec
import uvloop

from loadtest.errors import LoadTestError
from loadtest.mock.script import MockOptions
from loadtest.mock.server import serve_mock
from loadtest.transport import raise_open_files


def main() -> None:
    try:
        options = msgspec.json.decode(sys.argv[1] if len(sys.argv) > 1 else b"{}", type=MockOptions)
        port = int(sys.argv[2]) if len(sys.argv) > 2 else 0
        raise_open_files()
        uvloop.run(
            serve_mock(options, host="127.0.0.1", port=port, on_ready=lambda url: print(url, flush=True))
        )
    except (LoadTestError, ValueError) as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
