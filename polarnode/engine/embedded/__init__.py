"""The child process around one SGLang engine: the only place of asyncio and sglang in the package."""
