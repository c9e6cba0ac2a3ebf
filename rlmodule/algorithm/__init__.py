"""Algorithms: configuration, objective, critic, reward shaping and rollout correction."""
