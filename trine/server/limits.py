"""The house limits of a request, in one table: numbers only, used by schemas, admission and the wire.

Every list, number and depth that a client controls has its bound here. Knows nothing of HTTP.
"""

from __future__ import annotations

JSON_DEPTH = 64  # containers inside containers
JSON_ITEMS = 262_144  # values in one body, counted by commas: more would hold the event loop too long
JSON_BRACKETS = 32_768  # objects and arrays in one body
JSON_STRINGS = 100_000

CHOICES = 16  # n
LOGPROBS = 20  # alternatives shown for each token
STOPS = 16
STOP_CHARACTERS = 256
STOP_IDS = 64
BIASED_IDS = 1024
MESSAGES = 4096
PARTS = 1024  # of one message's content
PROMPTS = 1024  # prompts times n of one completions request
NAME_CHARACTERS = 256  # of a model, of who speaks
TEMPLATE_VALUES = 16  # template arguments of a request
TEMPLATE_CHARACTERS = 4096  # of one such argument
SMALLEST = 1e-6  # a float nearer to zero than this, and not zero, is a mistake: write 0

LABEL = r"[A-Za-z0-9_-]{1,64}"  # X-Request-Id: the client's own name of a request, never our key

HEADER_BYTES = 16 * 1024
HEADERS = 100
EARLY_BODY = 16 * 1024  # bytes of a body held before its sender is known
HELD_BODIES = 64  # the largest bodies that are held at once, counted in bytes, while they come
HEADER_SECONDS = 20.0  # from a connection's first byte, or its opening, to the end of the headers
BODY_SECONDS = 120.0  # from the headers to the end of the body
STALL_SECONDS = 60.0  # a client that takes nothing for so long has gone
KEEP_ALIVE_SECONDS = 10.0  # a comment is sent on a stream that is silent for so long
LAG_TOKENS = 16_384  # unread tokens of one request after which it is stopped
