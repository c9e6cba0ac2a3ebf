"""What all packages share: data types, contracts, registry, configuration, errors, metrics; no maths, no I/O."""
