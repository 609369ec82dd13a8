"""The entry point of `python -m ares_exp`, which does the same as the command `ares-exp`."""

import sys

from ares_exp.commands.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
