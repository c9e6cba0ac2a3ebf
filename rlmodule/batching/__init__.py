"""Which samples train in which step, on which rank: cost model, planners, sampler, packing."""
