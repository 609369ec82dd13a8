"""Changes of a container's files: which paths differ from its base (a delta), and the contents of these files."""
