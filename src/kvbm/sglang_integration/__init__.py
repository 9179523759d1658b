"""KVBM under SGLang: a HiCache storage backend (`storage`) and a linker of device pools (`linker`).

Both are clients of the library at a manager. `weights` and `namespace` say what a rank runs, `host_pages` and
`device_pages` where its pages lie, `pages_kept` finds, loads and stores them, and `keeper` is the thread that does it.
"""
