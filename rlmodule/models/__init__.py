"""What a model is, how it is loaded, what its head says. Leaves out how it is spread over processes."""
