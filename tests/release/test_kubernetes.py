"""The Kubernetes back-end, by the official client, against a server that checks every request; the manifests."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("kubernetes", reason="pip install dynpipe_ds[kubernetes]")
pytest.importorskip("kubernetes_validate", reason="pip install dynpipe_ds[dev]")

from dynpipe_ds.config import SECTION, parse_config
from dynpipe_ds.release import Constraints, ReleaseError, base, make_backend
from dynpipe_ds.release import kubernetes as module
from dynpipe_ds.release.kubernetes import KubernetesBackend
from tests.release.api_server import TOKEN, ApiServer, each_right, kubeconfig, load_manifest, without

MANIFESTS = Path(__file__).parents[2] / "docs" / "kubernetes"
MODES = ["statefulset", "indexed-job"]


@pytest.fixture
def pod(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., None]:
    """Make this process look like a pod, with the kubeconfig of a server."""
    from kubernetes.config import kube_config

    monkeypatch.setattr(module, "SERVICE_ACCOUNT", tmp_path / "none")
    monkeypatch.setattr(base, "_RETRY_S", 0.01)

    def become(server: ApiServer | None, name: str = "train-0", token: str = TOKEN) -> None:
        monkeypatch.setattr(socket, "gethostname", lambda: name)
        file = tmp_path / "config"
        if server is not None:
            file.write_text(kubeconfig(server, token))
        monkeypatch.setattr(kube_config, "KUBE_CONFIG_DEFAULT_LOCATION", str(file))

    return become


def serve(mode: str, **options: Any) -> ApiServer:
    objects = load_manifest(MANIFESTS / f"{mode}.yaml")
    return ApiServer(objects, options.pop("rules", objects["Role"]["rules"]), **options)


@pytest.fixture(params=MODES)
def server(request: pytest.FixtureRequest, pod: Callable[..., None]) -> Iterator[ApiServer]:
    with serve(request.param) as running:
        pod(running)
        yield running


def backend(server: ApiServer, **options: Any) -> KubernetesBackend:
    mode = "statefulset" if "StatefulSet" in server.objects else "indexed-job"
    return KubernetesBackend(**{"mode": mode, "name": "train", "timeout_s": 60.0, **options})


def size(server: ApiServer) -> tuple[int, ...]:
    (obj,) = server.objects.values()
    spec = obj["spec"]
    return (spec["replicas"],) if "replicas" in spec else (spec["completions"], spec["parallelism"])


@pytest.mark.parametrize("mode", MODES)
def test_manifests_belong_together(mode: str) -> None:
    """Valid (by loading), each thing refers to the other, and the comment's configuration is right."""
    path = MANIFESTS / f"{mode}.yaml"
    objects = load_manifest(path)
    (workload,) = (objects[kind] for kind in ("StatefulSet", "Job") if kind in objects)
    account = objects["ServiceAccount"]["metadata"]["name"]
    pods = workload["spec"]["template"]["spec"]
    binding = objects["RoleBinding"]
    assert pods["serviceAccountName"] == account == binding["subjects"][0]["name"]
    assert binding["roleRef"]["name"] == objects["Role"]["metadata"]["name"]
    assert objects["Role"]["rules"][0]["resourceNames"] == [workload["metadata"]["name"]]
    environment = {entry["name"]: entry["value"] for entry in pods["containers"][0]["env"]}
    count = workload["spec"].get("replicas", workload["spec"].get("completions"))
    assert environment["WORLD_SIZE"] == str(count)
    assert environment["MASTER_ADDR"] == f"{workload['metadata']['name']}-0.{objects['Service']['metadata']['name']}"
    (text,) = re.findall(r'# In the DeepSpeed JSON: ("repack".*)', path.read_text())
    release = parse_config({SECTION: json.loads(f"{{{text}}}")}).repack.release
    made = make_backend(release)
    assert isinstance(made, KubernetesBackend) and (made._mode, made._name) == (mode, workload["metadata"]["name"])


def test_shrinks(server: ApiServer) -> None:
    """Four pods become three, then one; trying first changes nothing."""
    give_back = backend(server)
    give_back.check()
    assert give_back.constraints() == Constraints(whole_nodes=True, lowest_stay=True)
    assert give_back.node_name() == "train-0"
    give_back.prepare([3], ["train-3"])
    assert set(size(server)) == {4}
    give_back.release([3], ["train-3"])
    assert set(size(server)) == {3}
    server.reconcile()
    give_back.verify()
    give_back.prepare([1, 2], ["train-2", "train-1"])
    give_back.release([1, 2], ["train-2", "train-1"])
    server.reconcile()
    give_back.verify()
    assert set(size(server)) == {1}
    changes = [line for line in server.requests if line.startswith("PATCH") and "dry run" not in line]
    assert len(changes) == 2


def test_pods_that_stay_are_noticed(server: ApiServer) -> None:
    backend(server).check()  # the server has read its schemas
    give_back = backend(server, timeout_s=2.0)
    give_back.check()
    give_back.release([3], ["train-3"])
    with pytest.raises(ReleaseError, match=r"research/train still has 4 pods 2 s after it was shrunk to 3"):
        give_back.verify()


def test_other_pods_only_look_for_credentials(server: ApiServer, pod: Callable[..., None]) -> None:
    pod(server, "train-2")
    backend(server).check()
    assert server.requests == []


@pytest.mark.parametrize("nodes", [[], ["train-1"], ["train-1", "train-3"], [f"train-{i}" for i in range(4)], ["x-3"]])
def test_only_the_last_pods_can_go(server: ApiServer, nodes: list[str]) -> None:
    give_back = backend(server)
    give_back.check()
    for call in (give_back.prepare, give_back.release):
        with pytest.raises(ReleaseError, match="must be the last ones of|is not train-<index>"):
            call([1], nodes)
    assert set(size(server)) == {4}


@pytest.mark.parametrize("mode", MODES)
def test_the_role_is_the_least_that_works(mode: str, pod: Callable[..., None]) -> None:
    """With any verb or resource less, the start is refused by name and with the remedy."""
    rules = load_manifest(MANIFESTS / f"{mode}.yaml")["Role"]["rules"]
    rights = each_right(rules)
    assert len(rights) == 3  # get, patch, one resource
    for key, value in rights:
        with serve(mode, rules=without(rules, key, value)) as server:
            pod(server)
            with pytest.raises(ReleaseError, match="403 Forbidden: .* is forbidden: .*needs the verbs get and patch"):
                backend(server).check()


def test_wrong_credentials_or_name(server: ApiServer, pod: Callable[..., None]) -> None:
    pod(server, token="stale")
    with pytest.raises(ReleaseError, match="answered 401 .*needs the verbs get and patch on"):
        backend(server).check()
    pod(server, "other-0")
    with pytest.raises(ReleaseError, match="repack.release.name = 'train': the host name 'other-0' is not train-<ind"):
        backend(server).check()
    server.rules = [{**rule, "resourceNames": []} for rule in server.rules]
    with pytest.raises(ReleaseError, match="answered 404 .*check repack.release.name, mode and namespace"):
        backend(server, name="other").check()


def test_a_job_that_can_not_shrink(pod: Callable[..., None]) -> None:
    with serve("indexed-job") as server:
        pod(server)
        spec = server.objects["Job"]["spec"]
        spec["parallelism"] = 2
        with pytest.raises(ReleaseError, match="completions = 4, parallelism = 2: only an Indexed Job with as many"):
            backend(server).check()
        spec.update(parallelism=4, completionMode="NonIndexed")
        with pytest.raises(ReleaseError, match="completionMode = NonIndexed"):
            backend(server).check()


def test_completions_alone_would_be_refused(pod: Callable[..., None]) -> None:
    """Why both are patched together."""
    from kubernetes.client.exceptions import ApiException

    with serve("indexed-job") as server:
        pod(server)
        give_back = backend(server)
        give_back.check()
        with pytest.raises(ApiException, match="spec.completions: field is immutable"):
            give_back._api.patch_namespaced_job("train", "research", {"spec": {"completions": 2}})


def test_no_server(pod: Callable[..., None]) -> None:
    with serve("statefulset") as server:
        pod(server)
    with pytest.raises(ReleaseError, match="StatefulSet research/train: no answer from the API server"):
        backend(server, timeout_s=1e6).check()


def test_no_credentials(pod: Callable[..., None]) -> None:
    pod(None)
    with pytest.raises(ReleaseError, match="no service-account token in .* and no kubeconfig .*automountService"):
        KubernetesBackend(mode="statefulset", name="train").check()


def test_no_client(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kubernetes", None)
    with pytest.raises(ReleaseError, match=r"package kubernetes is missing; install dynpipe_ds\[kubernetes\]"):
        KubernetesBackend(mode="statefulset", name="train").check()


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the test's certificate")
def test_inside_a_pod(pod: Callable[..., None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The service account's token, certificate and namespace, over TLS."""
    from kubernetes.config import incluster_config

    account = tmp_path / "account"
    account.mkdir()
    certificate, key = account / "ca.crt", tmp_path / "key.pem"
    subprocess.run(
        [
            "openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days",
            "1", "-keyout", str(key), "-out", str(certificate), "-subj", "/CN=kubernetes", "-addext",
            "subjectAltName=IP:127.0.0.1",
        ],
        check=True, capture_output=True,
    )
    (account / "token").write_text(TOKEN)
    (account / "namespace").write_text("research\n")
    pod(None)
    monkeypatch.setattr(module, "SERVICE_ACCOUNT", account)
    monkeypatch.setattr(incluster_config, "SERVICE_TOKEN_FILENAME", str(account / "token"))
    monkeypatch.setattr(incluster_config, "SERVICE_CERT_FILENAME", str(certificate))
    with serve("statefulset", tls=(certificate, key)) as server:
        monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
        monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(server.port))
        give_back = backend(server)
        give_back.check()
        give_back.release([2, 3], ["train-2", "train-3"])
        assert size(server) == (2,)


@pytest.mark.parametrize("mode", MODES)
def test_leaving(mode: str) -> None:
    """A StatefulSet's worker waits to be terminated, also when it is process 1; both end with 0."""
    process = multiprocessing.get_context("fork").Process(target=_leave, args=(mode,))
    process.start()
    if mode == "statefulset":
        process.join(0.3)
        assert process.is_alive()
        process.terminate()
    process.join(30)
    assert process.exitcode == 0


def _leave(mode: str) -> None:
    with contextlib.suppress(SystemExit):
        KubernetesBackend(mode=mode, name="train").leave()
    os._exit(3)
