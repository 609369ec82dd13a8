"""Tasks: what is to be solved, and how a solution is scored."""
