"""Merging: the run directories of a run's shards (`env.tasks=@i/n` on n machines) become one."""
