"""Of the original: the worker's half of its connector; see `kvbm.elsewhere`."""

from kvbm.elsewhere import refuse

refuse(__name__)
