"""Control of a running run by files in its directory: orders to it, and its state."""
