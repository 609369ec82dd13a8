"""The commands of `ares-exp snapshots`."""
