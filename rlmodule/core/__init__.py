"""Words every other package speaks: types, contracts, registry, configuration, errors. No maths, no input or output."""
