"""Of the original: the scheduler's half of its connector; see `kvbm.elsewhere`."""

from kvbm.elsewhere import refuse

refuse(__name__)
