"""The commands on recorded episodes."""
