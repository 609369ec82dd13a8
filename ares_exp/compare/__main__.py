"""`python -m ares_exp.compare`."""

import sys

from ares_exp.reporting.compare.command_line import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
