"""`tidegate-loadtest` and `python -m loadtest`: says what to install where the extra is missing."""

import importlib.util
import sys

NEEDED = ("httptools", "psutil")


def main() -> None:
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        sys.exit(f"the load tester needs {' and '.join(missing)}: pip install 'tidegate[loadtest]'")
    importlib.import_module("loadtest.cli").main()


if __name__ == "__main__":
    main()
