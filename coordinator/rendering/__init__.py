"""Rendering in this process: what vLLM's render service does for text, without asking it.

``fields``        a client's body as vLLM reads it: types, defaults, what is refused
``anthropic``     Anthropic's messages as a chat request
``conversation``  the messages as a chat template is given them
``template``      what a chat template tells of itself
``tokenizer``     the model's tokenizer and chat template, through transformers
``parsers``       what a worker's tool and reasoning parsers change of a request
``sampling``      the ``sampling_params`` that vLLM would resolve
``threads``       where the work is done, so that no request's streams wait for another's prompt
``renderer``      one client's body in, the render service's answer out

The measure is vLLM 0.33's own render: the same tokens and the same sampling params, or a refusal that says that a
render service is needed. ``tests/coordinator/rendering`` replays its recorded answers.
"""
