"""Pieces that backends are built from. Only ``mesh.py`` asks torch where a process sits."""
