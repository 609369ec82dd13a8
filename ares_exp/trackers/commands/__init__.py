"""The commands `sync` and `dashboard`, for Weights & Biases."""
