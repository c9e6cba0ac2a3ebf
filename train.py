"""Run a command from a checkout: ``python train.py`` is what ``rlmodule`` is after an installation."""

from rlmodule.cli import program

if __name__ == "__main__":
    program()
