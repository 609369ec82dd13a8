"""Collectors: where recorded episodes go while they are played."""
