"""The command line of `ares-exp`: parses the arguments, composes the config, and starts the run or command."""
