"""Of the original: its compiled part, as its connector names it; see `kvbm.elsewhere`."""

from kvbm.elsewhere import refuse

refuse(__name__)
