"""Collectors: where recorded episodes go while they are run."""
