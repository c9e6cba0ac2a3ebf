"""Run a command from a checkout: ``python train.py`` is what ``rlmodule`` is after an installation."""

import sys

from rlmodule.cli import main

if __name__ == "__main__":
    sys.exit(main())
