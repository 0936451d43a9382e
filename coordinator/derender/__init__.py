"""Telling reasoning and tool calls from text, in processes of their own, with vLLM's own parsers.

``vllm_parsers`` drives vLLM's classes and is loaded by a parser process alone; ``process_main`` is that process's loop.
On this side ``process`` owns one of them and what is asked of it, ``pool`` starts, watches and renews them, and
``stream`` is a worker's stream on its way through one.
"""
