"""The child process around one SGLang engine: the only asyncio and the only sglang in the house."""
