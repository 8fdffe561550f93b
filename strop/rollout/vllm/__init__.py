"""vLLM behind the engine protocol: in this process, in a process of another environment, or as a server."""
