"""Other chat APIs, translated into OpenAI's chat completions and back.

``responses_api`` (OpenAI's ``/v1/responses``) and ``messages_api`` (Anthropic's ``/v1/messages``) have the same four functions:
``chat_request`` for a request, ``answer`` and ``events`` for a whole and a streamed answer, and ``error``. ``fields`` has what both
read requests with.
"""
