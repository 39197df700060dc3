"""Schemas of a CustomResourceDefinition, made from the models that projects publish as Python packages.

Two generators have written these models: pydantic classes (`kubeflow_trainer_api`, which has the pods, too),
and classes with `openapi_types` (`kubernetes`, `kubeflow_training`). What comes out is structural: no
reference, no alternative, every field with its type. Descriptions are left out. What the generators have lost
is laid over it from rules.py.
"""

from __future__ import annotations

import ast
import functools
import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

import kubernetes.client.models
from kubeflow_trainer_api import models as trainer_models

from helpers.kube.definitions import rules as kube_rules
from helpers.kube.definitions.rules import EITHER, QUANTITY, Schema

TEXT: Schema = {"type": "string"}
FLAG: Schema = {"type": "boolean"}
COUNT: Schema = {"type": "integer", "format": "int32"}
LONG: Schema = {"type": "integer", "format": "int64"}
NUMBER: Schema = {"type": "number"}
TIME: Schema = {"type": "string", "format": "date-time"}
TEXTS: Schema = {"type": "object", "additionalProperties": TEXT}
METADATA: Schema = {  # of a template: all that controller-gen lets in there
    "type": "object",
    "properties": {
        "name": TEXT,
        "namespace": TEXT,
        "labels": TEXTS,
        "annotations": TEXTS,
        "finalizers": {"type": "array", "items": TEXT},
    },
}
# by the end of a model's name
_SPECIAL = {"ObjectMeta": METADATA, "Quantity": QUANTITY, "IntOrString": EITHER}
# an object is what may be a number or a text
_PLAIN = {"str": TEXT, "bool": FLAG, "float": NUMBER, "datetime": TIME, "object": EITHER}


def several(items: Schema, **rules: Any) -> Schema:
    return {"type": "array", "items": items, **rules}


def named(items: Schema) -> Schema:
    return {"type": "object", "additionalProperties": items}


def struct(*required: str, **fields: Schema) -> Schema:
    return {"type": "object", "properties": fields, **({"required": list(required)} if required else {})}


@functools.cache
def published(name: str) -> Schema:
    """A model of `kubeflow_trainer_api`."""
    whole = getattr(trainer_models, name).model_json_schema(by_alias=True)
    return _expanded(name, whole, whole.get("$defs", {}))


def _expanded(name: str, given: Schema, models: Schema) -> Schema:
    """`name`: of the model that `given` is, if it is one."""
    if (special := _special(name)) is not None:
        return special
    if "$ref" in given:
        inner = given["$ref"].rpartition("/")[2]
        return _expanded(inner, models[inner], models)
    if "anyOf" in given:
        (only,) = (one for one in given["anyOf"] if one != {"type": "null"})
        return _expanded("", only, models)
    if "properties" in given:
        fields = {field: _expanded("", value, models) for field, value in given["properties"].items()}
        return _model(name, fields, given.get("required", []))
    if given["type"] == "array":
        return several(_expanded("", given["items"], models))
    if isinstance(given.get("additionalProperties"), dict):
        return named(_expanded("", given["additionalProperties"], models))
    if given["type"] == "integer":
        return COUNT
    return {key: value for key, value in given.items() if key in ("type", "format")}


@functools.cache
def generated(name: str, text_of: Callable[[str], str] | None = None) -> Schema:
    """A model that has `openapi_types`. `text_of` gives the text of its class, by name; without it, it is one
    of `kubernetes`."""
    if (special := _special(name)) is not None:
        return special
    text = (
        text_of(name) if text_of is not None else inspect.getsource(getattr(kubernetes.client.models, name))
    )
    kinds, names = (_table(text, word) for word in ("openapi_types", "attribute_map"))
    needed = re.findall(r"Invalid value for `(\w+)`, must not be `None`", text)
    return _model(
        name,
        {names[key]: _typed(kind, text_of) for key, kind in kinds.items()},
        [names[key] for key in needed],
    )


def _table(text: str, word: str) -> dict[str, str]:
    match = re.search(rf"{word} = (\{{.*?\}})", text, re.DOTALL)
    assert match is not None, f"no {word} in the text of a model"
    found: dict[str, str] = ast.literal_eval(match[1])
    return found


def _typed(kind: str, text_of: Callable[[str], str] | None) -> Schema:
    if match := re.fullmatch(r"list\[(.+)\]", kind):
        return several(_typed(match[1], text_of))
    if match := re.fullmatch(r"dict\(str, (.+)\)", kind):
        return named(_typed(match[1], text_of))
    if kind == "int":
        return COUNT
    return _PLAIN[kind] if kind in _PLAIN else generated(kind, text_of)


def _special(name: str) -> Schema | None:
    return next((schema for end, schema in _SPECIAL.items() if name.endswith(end)), None)


def _model(name: str, fields: dict[str, Schema], required: list[str]) -> Schema:
    rules = kube_rules.of_model(name)
    laid = {field: _laid_over(field, value, rules.get(field, {})) for field, value in fields.items()}
    whole = {key: value for key, value in rules.items() if key.startswith("x-") or key == "minProperties"}
    return {**struct(*required, **laid), **whole}


def _laid_over(field: str, given: Schema, rules: Schema) -> Schema:
    if rules in (EITHER, QUANTITY):
        return rules
    if given == COUNT and field in kube_rules.LONG:
        given = LONG
    if "items" in given:
        rules = {**rules, "items": _laid_over(field, given["items"], rules.get("items", {}))}
    return {**given, **rules}


def walk(schema: Schema, path: str = "") -> Iterator[tuple[str, Schema]]:
    """Every schema in it, with where it is: `.spec.template`, `[]` for the items of a list, `{}` for the
    values of a map."""
    yield path, schema
    for name, inner in schema.get("properties", {}).items():
        yield from walk(inner, f"{path}.{name}")
    for key, mark in (("items", "[]"), ("additionalProperties", "{}")):
        if isinstance(schema.get(key), dict):
            yield from walk(schema[key], path + mark)


def as_old_servers_take_it(schema: Schema) -> Schema:
    """Kubernetes 1.20 reads the default "" as null, and refuses it; and a list's key must have a default, or
    be required.

    So names have no such default, and lists by such names (imagePullSecrets) are plain ones.
    """
    made = {key: value for key, value in schema.items() if (key, value) != ("default", "")}
    if "properties" in made:
        made["properties"] = {
            name: as_old_servers_take_it(inner) for name, inner in made["properties"].items()
        }
    for key in ("items", "additionalProperties"):
        if isinstance(made.get(key), dict):
            made[key] = as_old_servers_take_it(made[key])
    if not all(_always_there(made["items"], key) for key in made.get("x-kubernetes-list-map-keys", ())):
        made = {
            key: value
            for key, value in made.items()
            if key not in ("x-kubernetes-list-type", "x-kubernetes-list-map-keys")
        }
    return made


def _always_there(schema: Schema, field: str) -> bool:
    return field in schema.get("required", ()) or "default" in schema["properties"][field]
