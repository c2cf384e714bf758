"""``python -m pycomm.bench``."""

import sys

from pycomm.bench.cli import main

__all__: list[str] = []

if __name__ == "__main__":
    sys.exit(main())
