"""What callbacks share; no component."""
