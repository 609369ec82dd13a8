"""Wire formats of LLM providers, from the server's side: a module for each, behind the `Wire` protocol."""
