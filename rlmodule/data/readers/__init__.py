"""One file per kind of data file; ``data/files.py`` chooses among them."""
