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
from kvbm.settings.parse import (
    GB,
    SOCKET_PATH_BYTES_MAX,
    is_truthy,
    parse_count,
    parse_size,
    parse_socket_path,
)
from kvbm.settings.schema import CONSOLIDATOR_PORT_OFFSET, FIELDS, PORT_MAX, SCHEMA, Settings, variable
from kvbm.settings.setting import Kind, Setting

__all__ = [
    "CONSOLIDATOR_PORT_OFFSET",
    "FIELDS",
    "GB",
    "PORT_MAX",
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
    "is_truthy",
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
