"""Menu of the ways in which models write tool calls: each file reads and writes one."""
