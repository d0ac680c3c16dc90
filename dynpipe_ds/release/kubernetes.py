"""``kubernetes``: scale a StatefulSet down, or shrink an Indexed Job; by the official client.

Both keep the pods with the lowest indices. ``docs/repacking.md`` has the manifests, with the least role that works.
"""

from __future__ import annotations

import json
import re
import signal
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from dynpipe_ds.release.base import Constraints, ReleaseBackend, ReleaseError, poll
from dynpipe_ds.release.options import KubernetesOptions

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
# Said outright: what the client takes by itself differs between its versions.
_MERGE_PATCH = "application/merge-patch+json"


class KubernetesBackend(ReleaseBackend):
    """Makes the object that owns the workers' pods smaller.

    A StatefulSet starts a pod again that ends by itself, so there the freed workers wait to be terminated; pods of an
    Indexed Job leave first and count as succeeded.
    """

    def __init__(self, **given: Any) -> None:
        options = KubernetesOptions(**given)
        self._mode = options.mode
        self._name = options.name
        self._namespace = options.namespace
        self._timeout_s = options.timeout_s
        self._api: Any = None
        self._expected = 0
        self.workers_leave_first = options.mode == "indexed-job"

    def check(self) -> None:
        """Look for the client, credentials and the pod's place; the first pod also tries reading and changing."""
        self._connect()
        if self._index(socket.gethostname()) == 0:
            self._patch(self._size(), dry_run=True)

    def node_name(self) -> str:
        """The pod's host name, ``<name>-<index>``."""
        return socket.gethostname()

    def position(self) -> int:
        """The pod's index."""
        return self._index(socket.gethostname())

    def constraints(self) -> Constraints:
        """Whole pods, and the lowest stay."""
        return Constraints(whole_nodes=True, lowest_stay=True)

    def prepare(self, ranks: Sequence[int], nodes: Sequence[str]) -> None:
        """Make sure that these are the last pods, and that the API server would grant the change."""
        self._patch(self._remaining(nodes), dry_run=True)

    def release(self, ranks: Sequence[int], nodes: Sequence[str]) -> None:
        """Make the object smaller."""
        self._expected = self._remaining(nodes)
        self._patch(self._expected)

    def verify(self) -> None:
        """Wait until no more pods are there, or active, than stay."""
        pods = poll(self._num_pods, lambda pods: pods <= self._expected, self._timeout_s)
        if pods > self._expected:
            raise ReleaseError(
                f"{self} still has {pods} pods {self._timeout_s:g} s after it was shrunk to {self._expected}; look for "
                f"pods that can't be terminated"
            )

    def leave(self) -> NoReturn:
        """End this worker: in a StatefulSet by waiting to be terminated, since it would be started again."""
        if self.workers_leave_first:
            super().leave()
        signal.signal(signal.SIGTERM, lambda *_: super(KubernetesBackend, self).leave())
        while True:
            time.sleep(0.1)  # the handler runs between two sleeps, whichever thread the signal hit

    def __str__(self) -> str:
        kind = "StatefulSet" if self._mode == "statefulset" else "Job"
        return f"{kind} {self._namespace or 'default'}/{self._name}"

    def _index(self, pod: str) -> int:
        match = re.fullmatch(rf"{re.escape(self._name)}-(\d+)", pod)
        if match is None:
            raise ReleaseError(
                f"repack.release.name = {self._name!r}: the host name {pod!r} is not {self._name}-<index>, so this is "
                f"no pod of that {self._mode}; give the name of the object that made the pods, without hostNetwork"
            )
        return int(match[1])

    def _remaining(self, nodes: Sequence[str]) -> int:
        """How many pods stay when the given ones go."""
        size = self._size()
        going = sorted(self._index(node) for node in nodes)
        if not going or len(going) >= size or going != list(range(size - len(going), size)):
            raise ReleaseError(
                f"pods to give back = {', '.join(nodes) or 'none'}: must be the last ones of {self}, which has {size} "
                f"pods, and not all"
            )
        return going[0]

    def _size(self) -> int:
        spec = self._read()["spec"]
        if self._mode == "statefulset":
            return int(spec.get("replicas", 0))
        mode, completions, parallelism = (spec.get(k) for k in ("completionMode", "completions", "parallelism"))
        if mode != "Indexed" or completions is None or completions != parallelism:
            raise ReleaseError(
                f"{self}: completionMode = {mode}, completions = {completions}, parallelism = {parallelism}: only an "
                f"Indexed Job with as many completions as parallel pods can be shrunk"
            )
        return int(completions)

    def _num_pods(self) -> int:
        status = self._read().get("status", {})
        return int(status.get("replicas" if self._mode == "statefulset" else "active", 0))

    def _read(self) -> dict[str, Any]:
        api = self._api
        return self._request(
            api.read_namespaced_stateful_set_scale if self._mode == "statefulset" else api.read_namespaced_job
        )

    def _patch(self, size: int, *, dry_run: bool = False) -> None:
        options = {"dry_run": "All"} if dry_run else {}
        if self._mode == "statefulset":
            patch, spec = self._api.patch_namespaced_stateful_set_scale, {"replicas": size}
        else:
            patch, spec = self._api.patch_namespaced_job, {"completions": size, "parallelism": size}
        self._request(patch, {"spec": spec}, **options)

    def _request(self, call: Callable[..., Any], *body: Any, **options: Any) -> dict[str, Any]:
        from kubernetes.client.exceptions import ApiException
        from urllib3.exceptions import HTTPError

        try:
            # Undecoded: the client's types refuse objects of an API server that is newer than they are.
            options |= {"_preload_content": False, "_request_timeout": self._timeout_s}
            answer: dict[str, Any] = json.loads(call(self._name, self._namespace, *body, **options).data)
            return answer
        except ApiException as error:
            raise ReleaseError(
                f"{self}: the API server answered {error.status} {error.reason}: {_message(error.body)}; "
                f"{_remedy(error.status, self._mode)}"
            ) from error
        except HTTPError as error:
            raise ReleaseError(f"{self}: no answer from the API server: {error}") from error

    def _connect(self) -> None:
        """Load the pod's service account, or a kubeconfig where there is none."""
        try:
            from kubernetes import client, config
        except ImportError as error:
            raise ReleaseError(
                "repack.release.backend = 'kubernetes': the Python package kubernetes is missing; install "
                "dynpipe_ds[kubernetes]"
            ) from error
        settings = client.Configuration()
        try:
            if (SERVICE_ACCOUNT / "token").is_file():
                config.load_incluster_config(client_configuration=settings)
                self._namespace = self._namespace or (SERVICE_ACCOUNT / "namespace").read_text().strip()
            else:
                config.load_kube_config(client_configuration=settings)
                _, context = config.list_kube_config_contexts()
                self._namespace = self._namespace or context["context"].get("namespace", "default")
        except config.ConfigException as error:
            raise ReleaseError(
                f"repack.release.backend = 'kubernetes': no service-account token in {SERVICE_ACCOUNT} and no "
                f"kubeconfig ({error}); give the pod a service account with automountServiceAccountToken"
            ) from error
        api = client.AppsV1Api if self._mode == "statefulset" else client.BatchV1Api
        self._api = api(client.ApiClient(settings, header_name="Content-Type", header_value=_MERGE_PATCH))


def _message(body: Any) -> str:
    """What a ``Status`` object of the API server says."""
    try:
        return str(json.loads(body)["message"])
    except (TypeError, ValueError, KeyError):
        return str(body)[:200]


def _remedy(status: int, mode: str) -> str:
    resource = "statefulsets/scale" if mode == "statefulset" else "jobs"
    if status in (401, 403):
        return f"the pod's service account needs the verbs get and patch on {resource}"
    if status == 404:
        return "check repack.release.name, mode and namespace"
    return "it was left as it is"
