"""What the command lines beside `python -m ares_exp` share: subcommands, errors, and text on a terminal."""
