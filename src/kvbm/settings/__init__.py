"""Settings: the schema, loading with precedence, and advice. The only package that reads the environment."""

from kvbm.settings.advice import (
    admission_name,
    admission_notices,
    available_memory_bytes,
    container_free_bytes,
    container_limit_bytes,
    disk_slots,
    host_memory_field,
    host_slots,
    manager_notices,
    request_notices,
    shared_manager_notices,
    shared_request_notices,
    size_notices,
    staging_slots,
)
from kvbm.settings.load import LoadedSettings, file_faults, load_settings, process_environment
from kvbm.settings.parse import GB, SOCKET_PATH_BYTES_MAX, parse_count, parse_size, parse_socket_path
from kvbm.settings.schema import FIELDS, SCHEMA, Settings, variable
from kvbm.settings.setting import Kind, Setting

__all__ = [
    "FIELDS",
    "GB",
    "SCHEMA",
    "SOCKET_PATH_BYTES_MAX",
    "Kind",
    "LoadedSettings",
    "Setting",
    "Settings",
    "admission_name",
    "admission_notices",
    "available_memory_bytes",
    "container_free_bytes",
    "container_limit_bytes",
    "disk_slots",
    "file_faults",
    "host_memory_field",
    "host_slots",
    "load_settings",
    "manager_notices",
    "parse_count",
    "parse_size",
    "parse_socket_path",
    "process_environment",
    "request_notices",
    "shared_manager_notices",
    "shared_request_notices",
    "size_notices",
    "staging_slots",
    "variable",
]
