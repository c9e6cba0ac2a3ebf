"""What launchers and ranks share; no component."""
