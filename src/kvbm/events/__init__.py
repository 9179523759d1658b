"""KV events on the wire: what engines publish, what routers read, and the consolidator between them."""
