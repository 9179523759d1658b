"""Of the original: its connector for TensorRT-LLM; see `kvbm.elsewhere`."""

from kvbm.elsewhere import refuse

refuse(__name__)
