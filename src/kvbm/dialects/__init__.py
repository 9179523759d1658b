"""What clients say about a request's future in the words of other APIs and engines, translated into our form.

One file for each dialect. All are pure and take anything: nothing raises, and `hints.read_hint` checks what comes out.
"""

from kvbm.dialects.http import hint_of_http
from kvbm.dialects.trtllm import hint_of_priorities

__all__ = ["hint_of_http", "hint_of_priorities"]
