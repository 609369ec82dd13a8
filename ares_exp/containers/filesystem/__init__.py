"""Changes of a file system: a delta of entries, with their contents in a content-addressed object store."""
