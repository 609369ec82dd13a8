"""Third-party agents: programs that run in the container. Their LLM requests over HTTP are sent to the policy."""
