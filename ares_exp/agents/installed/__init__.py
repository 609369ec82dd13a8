"""Third-party agents: programs in the container whose LLM requests over HTTP are answered by this process."""
