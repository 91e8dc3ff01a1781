"""`python -m benchmarks.validation`."""

from benchmarks.validation.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
