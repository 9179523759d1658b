"""Of the original: the blocks of a block manager inside vLLM; see `kvbm.elsewhere`."""

from kvbm.elsewhere import refuse

refuse(__name__)
