"""Model servers: the small local one, and how any OpenAI-compatible one is called."""
