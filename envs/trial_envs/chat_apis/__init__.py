"""Chat APIs through which programs call the policy. Requests are translated to OpenAI's Chat Completions API.

``chat_completions``, ``responses_api`` (OpenAI's ``/v1/responses``) and ``messages_api`` (Anthropic's ``/v1/messages``) have
the same four functions: ``chat_request`` translates a request to a chat completion request, ``answer`` translates a chat
completion to an answer, ``events`` translates it to the events of a streamed answer, and ``error`` returns the body of an error.
``fields`` has functions that read and check the fields of requests.
"""
