"""`python -m ares_exp.report`."""

import sys

from ares_exp.report.command_line import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
