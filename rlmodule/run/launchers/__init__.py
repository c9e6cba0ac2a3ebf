"""How the ranks of a run are started, one file per launcher."""
