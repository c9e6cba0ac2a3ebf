"""A run from configuration to result: build, check, fit. Leaves out the command line (``cli.py``)."""
