"""Of the original: the compiled part; see `kvbm.elsewhere`."""

from kvbm.elsewhere import refuse

refuse(__name__)
