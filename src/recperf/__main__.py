"""`python -m recperf` is the same as `recperf`."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
