"""`python -m ares_exp`."""

import sys

from ares_exp.commands.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
