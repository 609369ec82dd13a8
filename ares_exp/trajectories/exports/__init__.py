"""Exports of episodes to other formats: ATIF, Parquet, and rows for training."""
