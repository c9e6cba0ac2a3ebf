"""An algorithm beside its loss and its advantage: configuration, objective, critic, shaping, rollout correction."""
