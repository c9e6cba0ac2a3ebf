"""The parts of a run, each made of settings: machine, strategy, models, data, trainer; ``run/run.py`` joins them."""
