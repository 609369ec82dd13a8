"""The formats of trajectory files, and functions that write and read them."""
