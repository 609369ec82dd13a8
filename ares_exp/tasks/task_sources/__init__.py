"""Where tasks come from besides a local folder: `registry.json` files, and git repositories."""
