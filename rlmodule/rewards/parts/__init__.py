"""What rewards share; no component."""
