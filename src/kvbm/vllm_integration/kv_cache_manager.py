"""Of the original: a block manager inside vLLM; see `kvbm.elsewhere`."""

from kvbm.elsewhere import refuse

refuse(__name__)
