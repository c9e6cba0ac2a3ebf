"""Pieces that backends are put together from. Only ``mesh.py`` asks torch where a process sits."""
