"""What commands and the command line share; no component."""
