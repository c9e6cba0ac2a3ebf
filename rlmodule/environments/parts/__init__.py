"""What environments share; no component."""
