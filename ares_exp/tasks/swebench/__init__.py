"""SWE-bench: rows of its data sets as tasks, graded in the same way as by its harness."""
