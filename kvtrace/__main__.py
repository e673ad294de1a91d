"""`python -m kvtrace`: the same program as `kvtrace`."""

import sys

from kvtrace.cli import main

if __name__ == "__main__":
    sys.exit(main())
