"""The command line: turns argv into a composed config, a job and an exit code."""
