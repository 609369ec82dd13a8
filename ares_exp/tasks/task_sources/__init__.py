"""Sources of tasks other than a local folder: `registry.json` files and git repositories."""
