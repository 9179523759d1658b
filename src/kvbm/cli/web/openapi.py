"""The OpenAPI document, from the types of the operations, and the same as a page for people."""

from __future__ import annotations

import html
import json
from typing import Any

import msgspec

from kvbm.cli.web.documents import Trouble
from kvbm.cli.web.operations import OPERATIONS, Operation
from kvbm.cli.web.troubles import TROUBLES

VERSION = "1"
_WHERE = "#/components/schemas/"


def document() -> dict[str, Any]:
    """The document, OpenAPI 3.1."""
    types = {kind for each in OPERATIONS for kind in (each.given, each.answer)} | {Trouble}
    _, schemas = msgspec.json.schema_components(sorted(types, key=str), ref_template=_WHERE + "{name}")
    for schema in schemas.values():
        schema["description"] = " ".join(schema.get("description", "").split())  # as a docstring is broken
    paths = {each.path: {each.method.lower(): _described(each, schemas)} for each in OPERATIONS}
    for each in OPERATIONS:
        if each.method == "GET":
            schemas.pop(each.given.__name__, None)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "KVBM admin API",
            "version": VERSION,
            "description": "What an operator can do on the command line, with the fields of `--json`.",
        },
        "security": [{"token": []}],
        "paths": paths,
        "components": {
            "schemas": schemas,
            "responses": {
                str(status): {
                    "description": text,
                    "content": {"application/json": {"schema": {"$ref": _WHERE + Trouble.__name__}}},
                }
                for status, text in TROUBLES.items()
            },
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }


def _described(operation: Operation, schemas: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {
        "operationId": operation.path.rpartition("/")[2].replace("-", "_"),
        "summary": operation.summary,
        "responses": {
            "200": {
                "description": "Done" if operation.method == "POST" else "The answer",
                "content": {"application/json": {"schema": {"$ref": _WHERE + operation.answer.__name__}}},
            },
            **{str(status): {"$ref": f"#/components/responses/{status}"} for status in TROUBLES},
        },
    }
    if operation.method == "POST":
        schema = {"$ref": _WHERE + operation.given.__name__}
        found["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    else:
        found["parameters"] = [
            {
                "name": name,
                "in": "query",
                "required": False,
                "description": schema.pop("description", ""),
                "schema": schema,
            }
            for name, schema in schemas[operation.given.__name__]["properties"].items()
        ]
    return found


def page() -> str:
    """The document as a page that needs nothing else."""
    described = document()
    schemas = described["components"]["schemas"]
    parts = []
    for path, methods in described["paths"].items():
        for method, found in methods.items():
            parts.append(_section(method.upper(), path, found))
    names = "".join(_schema(name, schema) for name, schema in sorted(schemas.items()))
    errors = "".join(
        f"<tr><td>{status}</td><td>{html.escape(text)}</td></tr>" for status, text in TROUBLES.items()
    )
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>KVBM admin API</title><link rel="stylesheet" href="/page.css"></head><body class="docs">
<header><h1>KVBM admin API</h1><nav><a href="/">Live page</a> <a href="/openapi.json">openapi.json</a></nav></header>
<main><p>What an operator can do on the command line, with the fields of <code>--json</code>. A call has the header
<code>Authorization: Bearer TOKEN</code>; POST has a JSON body. An error is <code>{{"error": "one line"}}</code>.</p>
<pre>curl -H "Authorization: Bearer $(cat FILE)" http://127.0.0.1:6881/api/status</pre>
{"".join(parts)}<section><h2>Errors</h2><table><tbody>{errors}</tbody></table></section>
<section><h2>Types</h2></section>{names}</main></body></html>
"""


def _section(method: str, path: str, found: dict[str, Any]) -> str:
    rows = [_row(each["name"], each["schema"], each["description"]) for each in found.get("parameters", ())]
    head = "<thead><tr><th>parameter</th><th>type</th><th></th></tr></thead>"
    table = f"<table>{head}<tbody>{''.join(rows)}</tbody></table>"
    body = ""
    if "requestBody" in found:
        schema = found["requestBody"]["content"]["application/json"]["schema"]
        body = f"<p>Body: {_type(schema)}</p>"
    answer = found["responses"]["200"]["content"]["application/json"]["schema"]
    return (
        f'<section id="{found["operationId"]}"><h2><span class="method">{method}</span> <code>{path}</code></h2>'
        f"<p>{html.escape(found['summary'])}. Answers {_type(answer)}.</p>{table if rows else ''}{body}</section>"
    )


def _schema(name: str, schema: dict[str, Any]) -> str:
    rows = "".join(
        _row(field, each, each.get("description", "")) for field, each in schema.get("properties", {}).items()
    )
    text = html.escape(schema["description"])
    return f'<section id="{name}"><h3>{name}</h3><p>{text}</p><table><tbody>{rows}</tbody></table></section>'


def _row(name: str, schema: dict[str, Any], text: str) -> str:
    default = f" Default: {json.dumps(schema['default'])}." if "default" in schema else ""
    return (
        f"<tr><td><code>{html.escape(name)}</code></td><td>{_type(schema)}</td>"
        f"<td>{html.escape(text + default)}</td></tr>"
    )


def _type(schema: dict[str, Any]) -> str:
    """A schema in a few words, with a link where it has a name."""
    if "$ref" in schema:
        name = schema["$ref"].removeprefix(_WHERE)
        return f'<a href="#{name}">{name}</a>'
    if "anyOf" in schema:
        return " or ".join(map(_type, schema["anyOf"]))
    if "enum" in schema:
        return " or ".join(html.escape(json.dumps(value)) for value in schema["enum"])
    kind = str(schema.get("type", "anything"))
    if kind == "array":
        inner = schema.get("items") or {}
        return f"list of {_type(inner)}" if inner else "list"
    if kind == "object":
        inner = schema.get("additionalProperties")
        return f"object of {_type(inner)}" if isinstance(inner, dict) and inner else "object"
    bounds = [f"{word} {schema[key]}" for key, word in _BOUNDS.items() if key in schema]
    return html.escape(" ".join([kind, *bounds]))


_BOUNDS = {"minimum": "from", "exclusiveMinimum": "above", "maximum": "to"}
