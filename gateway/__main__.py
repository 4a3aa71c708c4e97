"""`python -m gateway` is the `tidegate` command."""

from gateway.cli import main

if __name__ == "__main__":
    main()
