"""SWE-bench: rows of its data sets as tasks, graded as its harness grades."""
