"""KV Cache Streaming over MOQT."""
