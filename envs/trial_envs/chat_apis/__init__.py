"""Chat APIs through which programs call the policy. Requests of the other APIs are translated to chat completions.

``chat_completions``, ``responses_api`` (OpenAI's ``/v1/responses``) and ``messages_api`` (Anthropic's ``/v1/messages``) have the
same four functions: ``chat_request`` for a request, ``answer`` and ``events`` for a whole and a streamed answer, and ``error``.
``fields`` has the functions that read and check the fields of translated requests.
"""
