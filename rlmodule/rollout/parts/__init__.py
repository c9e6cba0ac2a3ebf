"""What rollout engines share; no component."""
