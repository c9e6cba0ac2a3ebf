"""Which samples train when and where: cost of a sample, number partitioning, the plan of a mini-batch."""
