"""The generated pages of docs/: `python -m tests.docs_reference` writes them, with `--check` it only compares."""
