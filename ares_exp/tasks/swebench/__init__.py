"""SWE-bench: tasks made from rows of its data sets, graded by its official harness."""
