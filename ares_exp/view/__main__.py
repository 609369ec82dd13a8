"""`python -m ares_exp.view`."""

import sys

from ares_exp.view.command_line import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
