"""``python -m pycomm``: the same as the command ``pycomm``."""

import sys

from pycomm.cli import main

__all__: list[str] = []

if __name__ == "__main__":
    sys.exit(main())
