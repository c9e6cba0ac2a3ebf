"""What loggers share; no component."""
