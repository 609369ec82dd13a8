"""Checks that take long and are run by hand. The first lines of each module describe how."""
