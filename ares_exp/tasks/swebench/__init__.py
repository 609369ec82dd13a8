"""SWE-bench tasks, which are made from rows of data sets and graded by the official harness."""
