"""Sources of tasks that are not in a local folder: `registry.json` files and git repositories."""
