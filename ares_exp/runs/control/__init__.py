"""Control and monitoring of a running run: orders and its status as files in its directory, and stalls."""
