"""The episode journal: what a code agent asked of the world and was told, in order, so that it can be run again."""
