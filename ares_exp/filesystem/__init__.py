"""What a container changed of its base: as a delta of entries, with contents in a content-addressed object store."""
