"""`python -m ares_exp.export_job`."""

import sys

from ares_exp.harbor_export.command_line import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
