"""The demo: a language model whose KV cache travels. Not part of the product; run from the root of the
repository.
"""
