"""`python -m ares_exp.merge`."""

import sys

from ares_exp.reporting.merge.command_line import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
