"""What a model is, how it is loaded, what its heads say. Leaves out how it is spread over processes (``strategies/``)."""
