"""Sources of tasks besides a local folder: `registry.json` files and git repositories."""
