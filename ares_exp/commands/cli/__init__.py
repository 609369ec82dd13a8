"""The command line: argv becomes a composed config, a job, an exit code.

Imports everything; imported by nothing but the entry points.
"""
