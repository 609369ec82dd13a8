"""The command line: argv becomes a composed config, a job and an exit code."""
