"""Snippets of vLLM's offline API, as scripts have them.

Each public function of a module here is one snippet. It returns something that JSON can hold, or
raises. A parameter named ``llm`` is a model with SmolLM2's weights that all snippets share; one
named ``processed_llm`` returns ``logprobs_mode="processed_logprobs"``, and any number of them. The
snippets know vLLM's names only, so that vLLM and nanovllm can both run them.
"""
