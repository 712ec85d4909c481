"""APIs in which a program may ask the policy. Chat completions are the form of every call; the others are translated.

``chat_completions``, ``responses_api`` (OpenAI's ``/v1/responses``) and ``messages_api`` (Anthropic's ``/v1/messages``) have the
same four functions: ``chat_request`` for a request, ``answer`` and ``events`` for a whole and a streamed answer, and ``error``.
``fields`` has what the translations read requests with.
"""
