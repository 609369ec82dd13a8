"""Code agents: the scaffolds that talk to an LLM and work in a container."""
