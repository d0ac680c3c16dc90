"""An HTTP server that speaks as much of the Kubernetes API as shrinking needs, and checks every request.

It judges as an API server does: token, role (by its rules), path, query, content type, and the object that a patch
results in, against the official schema. Controllers are played by :meth:`ApiServer.reconcile`.
"""

from __future__ import annotations

import copy
import json
import re
import ssl
import threading
from collections.abc import Iterable
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import kubernetes_validate
import yaml

VERSION = "1.31"
TOKEN = "secret-of-the-pod"
_PATH = re.compile(r"/apis/(apps|batch)/v1/namespaces/([\w-]+)/(statefulsets|jobs)/([\w-]+)(/scale)?")
_VERBS = {"GET": "get", "PATCH": "patch"}


def load_manifest(path: Path) -> dict[str, dict[str, Any]]:
    """The documents of a manifest by kind, each valid by the official schema."""
    documents = list(yaml.safe_load_all(path.read_text(encoding="utf-8")))
    for document in documents:
        _validate(json.dumps(document, sort_keys=True))
    return {document["kind"]: document for document in documents}


@cache
def _validate(text: str) -> None:
    kubernetes_validate.validate(json.loads(text), VERSION, strict=True)


class Denied(Exception):
    """A request that is answered by a ``Status``."""

    def __init__(self, code: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.code, self.reason, self.message = code, reason, message


class ApiServer:
    """Serves one StatefulSet and one Job; ``with`` starts and stops it.

    Args:
        objects: kinds and objects as written by a user.
        rules: of the caller's role.
        tls: files of a certificate and its key; plain HTTP otherwise.
        namespace: of everything.
    """

    def __init__(
        self, objects: dict[str, dict[str, Any]], rules: list[dict[str, Any]], *, tls: tuple[Path, Path] | None = None,
        namespace: str = "research",
    ) -> None:
        self.objects = {k: copy.deepcopy(objects[k]) for k in ("StatefulSet", "Job") if k in objects}
        self.rules, self.namespace, self.requests = rules, namespace, list[str]()
        for kind, obj in self.objects.items():
            obj["metadata"]["namespace"] = namespace
            for container in obj["spec"]["template"]["spec"]["containers"]:
                limits = container["resources"]["limits"]  # a server shows quantities as text
                limits.update({name: str(quantity) for name, quantity in limits.items()})
            obj["status"] = {"replicas": obj["spec"]["replicas"]} if kind == "StatefulSet" else {
                "active": obj["spec"]["parallelism"]
            }
        handler = type("Handler", (_Handler,), {"api": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        if tls is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(*tls)
            self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        self.port = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)

    def __enter__(self) -> ApiServer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def reconcile(self) -> None:
        """What the controllers do: the pods become as many as asked for."""
        for kind, obj in self.objects.items():
            if kind == "StatefulSet":
                obj["status"]["replicas"] = obj["spec"]["replicas"]
            else:
                obj["status"]["active"] = min(obj["status"]["active"], obj["spec"]["parallelism"])

    def answer(self, method: str, target: str, headers: Any, body: bytes) -> dict[str, Any]:
        """The object that a request gets, or :class:`Denied`."""
        url = urlsplit(target)
        query = parse_qs(url.query, strict_parsing=bool(url.query))
        self.requests.append(f"{method} {url.path}{' dry run' if 'dryRun' in query else ''}")
        if headers.get("Authorization", "").lower() != f"bearer {TOKEN}":
            raise Denied(401, "Unauthorized", "Unauthorized")
        match = _PATH.fullmatch(url.path)
        if match is None or method not in _VERBS:
            raise Denied(404, "NotFound", "the server could not find the requested resource")
        group, namespace, plural, name, scale = match.groups()
        self._check_role(group, plural + (scale or ""), _VERBS[method], name, namespace)
        kind = "StatefulSet" if plural == "statefulsets" else "Job"
        obj = self.objects.get(kind)
        if obj is None or (group == "apps") != (kind == "StatefulSet") or (scale and kind == "Job"):
            raise Denied(404, "NotFound", "the server could not find the requested resource")
        if name != obj["metadata"]["name"] or namespace != self.namespace:
            raise Denied(404, "NotFound", f'{plural}.{group} "{name}" not found')
        shown = _scale_of(obj) if scale else obj
        if method == "GET":
            self._check_query(query, {"pretty"})
            return shown
        self._check_query(query, {"pretty", "dryRun", "fieldManager", "fieldValidation", "force"})
        changed = _patched(shown, headers.get("Content-Type", ""), body)
        _check_change(kind, shown, changed)
        if query.get("dryRun") not in (None, ["All"]):
            raise Denied(422, "Invalid", f"dryRun: Unsupported value: {query['dryRun']}")
        if "dryRun" not in query:
            if scale:
                obj["spec"]["replicas"] = changed["spec"]["replicas"]
            else:
                self.objects[kind] = changed
        return changed

    def _check_role(self, group: str, resource: str, verb: str, name: str, namespace: str) -> None:
        for rule in self.rules:
            named = rule.get("resourceNames")
            if group in rule["apiGroups"] and resource in rule["resources"] and verb in rule["verbs"]:
                if not named or name in named:
                    return
        raise Denied(
            403, "Forbidden",
            f'{resource}.{group} "{name}" is forbidden: User "system:serviceaccount:{namespace}:train" cannot {verb} '
            f'resource "{resource}" in API group "{group}" in the namespace "{namespace}"',
        )

    @staticmethod
    def _check_query(query: dict[str, Any], known: set[str]) -> None:
        if unknown := set(query) - known:
            raise Denied(400, "BadRequest", f"unknown query parameters {sorted(unknown)}")


def _scale_of(stateful_set: dict[str, Any]) -> dict[str, Any]:
    return {
        "apiVersion": "autoscaling/v1", "kind": "Scale", "metadata": dict(stateful_set["metadata"]),
        "spec": {"replicas": stateful_set["spec"]["replicas"]},
        "status": {"replicas": stateful_set["status"]["replicas"], "selector": "app=train"},
    }


def _patched(shown: dict[str, Any], content_type: str, body: bytes) -> dict[str, Any]:
    """The object after a merge patch, valid by the schema."""
    if content_type not in ("application/merge-patch+json", "application/strategic-merge-patch+json"):
        # A JSON patch is a list of operations; the callers under test send none.
        raise Denied(
            415, "UnsupportedMediaType", f"the body of the request was in an unknown format: {content_type}"
        )
    try:
        patch = json.loads(body)
        changed: dict[str, Any] = _merge(shown, patch)
        _validate(json.dumps(changed, sort_keys=True))
    except (ValueError, TypeError, kubernetes_validate.ValidationError) as error:
        raise Denied(422, "Invalid", f"{shown['kind']} is invalid: {error}") from error
    return changed


def _merge(target: Any, patch: Any) -> Any:
    """RFC 7386."""
    if not isinstance(patch, dict):
        return patch
    merged = dict(target) if isinstance(target, dict) else {}
    for key, value in patch.items():
        if value is None:
            merged.pop(key, None)
        else:
            merged[key] = _merge(merged.get(key), value)
    return merged


def _check_change(kind: str, old: dict[str, Any], new: dict[str, Any]) -> None:
    """A running Job's template can't change; its completions only together with its parallelism."""
    if kind != "Job":
        return
    was, spec = old["spec"], new["spec"]
    if {**was, "completions": 0, "parallelism": 0} != {**spec, "completions": 0, "parallelism": 0}:
        raise Denied(422, "Invalid", 'Job.batch "train" is invalid: spec.template: field is immutable')
    elastic = spec.get("completionMode") == "Indexed" and spec["completions"] == spec["parallelism"]
    if spec["completions"] != was["completions"] and not elastic:
        raise Denied(422, "Invalid", 'Job.batch "train" is invalid: spec.completions: field is immutable')


class _Handler(BaseHTTPRequestHandler):
    api: ApiServer
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._serve()

    do_PATCH = do_PUT = do_POST = do_DELETE = do_GET

    def _serve(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        try:
            code, answer = 200, self.api.answer(self.command, self.path, self.headers, body)
        except Denied as denied:
            code, answer = denied.code, {
                "apiVersion": "v1", "kind": "Status", "metadata": {}, "status": "Failure", "code": denied.code,
                "reason": denied.reason, "message": denied.message,
            }
        if code == 200:
            _validate(json.dumps(answer, sort_keys=True))
        payload = json.dumps(answer).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(payload)))
        self.end_headers()
        self.wfile.write(payload)

    def log_message(self, *_: Any) -> None:
        """Say nothing: the tests look at ``requests``."""


def kubeconfig(server: ApiServer, token: str = TOKEN) -> str:
    """A kubeconfig for a server without TLS."""
    return json.dumps({
        "apiVersion": "v1", "kind": "Config", "current-context": "here",
        "clusters": [{"name": "c", "cluster": {"server": f"http://127.0.0.1:{server.port}"}}],
        "users": [{"name": "u", "user": {"token": token}}],
        "contexts": [{"name": "here", "context": {"cluster": "c", "user": "u", "namespace": server.namespace}}],
    })


def without(rules: list[dict[str, Any]], key: str, value: str) -> list[dict[str, Any]]:
    """The rules less one verb or resource."""
    return [{**rule, key: [v for v in rule[key] if v != value]} for rule in rules]


def each_right(rules: Iterable[dict[str, Any]]) -> list[tuple[str, str]]:
    """Every verb and resource that some rule grants."""
    return sorted({(key, value) for rule in rules for key in ("verbs", "resources") for value in rule[key]})
