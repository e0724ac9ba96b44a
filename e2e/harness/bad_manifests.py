"""A hundred manifests that can't work, and what is to become of each.

`REFUSED` never gets past the API server: the schema or a CEL rule names the field. `CONDITIONED` is well formed and
still can't be served: it becomes a condition, beside services that go on. `LITERAL` looks dangerous and is only text.
Fields given replace the whole field of a tiny service's spec.
"""

from __future__ import annotations

from typing import Any

Spec = dict[str, Any]

LONG = "x" * 5000
SHELL = "$(touch /tmp/owned); `id` && rm -rf / | cat > /tmp/x"
PROMQL = 'x"} or vector(1) or up{job=~".*'


def model(**fields: Any) -> Spec:
    return {"model": {"uri": "file:///tiny-llama", **fields}}


def uri(text: Any) -> Spec:
    return {"model": {"uri": text}}


def engine(**fields: Any) -> Spec:
    return {"engine": fields}


def gpu(**fields: Any) -> Spec:
    return {"resources": {"gpu": fields}}


def amounts(**fields: Any) -> Spec:
    return {"resources": {"requests": fields}}


def autoscaling(**fields: Any) -> Spec:
    return {"autoscaling": {"maxReplicas": 3, **fields}}


def pod(**fields: Any) -> Spec:
    return {"podTemplate": fields}


def env(*variables: Spec) -> Spec:
    return pod(env=list(variables))


REFUSED: dict[str, tuple[Spec, str]] = {
    # wrong types
    "replicas is text": ({"replicas": "two"}, "spec.replicas"),
    "replicas is a fraction": ({"replicas": 1.5}, "spec.replicas"),
    "replicas is a list": ({"replicas": [1]}, "spec.replicas"),
    "model is text": ({"model": "file:///tiny-llama"}, "spec.model"),
    "model is a list": ({"model": []}, "spec.model"),
    "uri is a number": (uri(7), "spec.model.uri"),
    "uri is an object": (uri({"hf": "x"}), "spec.model.uri"),
    "maxModelLen is text": (engine(maxModelLen="long"), "spec.engine.maxModelLen"),
    "maxNumSeqs is a word": (engine(maxNumSeqs="many"), "spec.engine.maxNumSeqs"),
    "prefixCaching is text": (engine(prefixCaching="yes"), "spec.engine.prefixCaching"),
    "gpu is a number": ({"resources": {"gpu": 1}}, "spec.resources.gpu"),
    "gpu.count is text": (gpu(count="one", product="l4"), "spec.resources.gpu.count"),
    "memory is a number": (amounts(memory=4), "spec.resources.requests.memory"),
    "labels are a list": (pod(labels=["a=b"]), "spec.podTemplate.labels"),
    "a label is a number": (pod(labels={"a": 1}), "spec.podTemplate.labels"),
    "env is an object": (pod(env={"A": "b"}), "spec.podTemplate.env"),
    "tolerations are an object": ({"scheduling": {"tolerations": {}}}, "spec.scheduling.tolerations"),
    "slo is text": ({"slo": "2s"}, "spec.slo"),
    # missing
    "no model": ({"model": None}, "spec.model"),
    "no uri": ({"model": {}}, "spec.model.uri"),
    "no maxReplicas": ({"autoscaling": {}}, "spec.autoscaling.maxReplicas"),
    "an env without a name": (env({"value": "x"}), "spec.podTemplate.env[0].name"),
    "a shape without layers": (model(shape={"heads": 4}), "spec.model.shape"),
    # out of bounds
    "replicas below zero": ({"replicas": -1}, "spec.replicas"),
    "replicas beyond any cluster": ({"replicas": 1001}, "spec.replicas"),
    "replicas beyond any integer": ({"replicas": 2**62}, "spec.replicas"),
    "minReplicas below zero": (autoscaling(minReplicas=-1), "spec.autoscaling.minReplicas"),
    "an idle time of words": (autoscaling(minReplicas=0, idleTimeout="soon"), "spec.autoscaling.idleTimeout"),
    "maxReplicas of none": (autoscaling(maxReplicas=0), "spec.autoscaling.maxReplicas"),
    "queueDepth of none": (autoscaling(queueDepth=0), "spec.autoscaling.queueDepth"),
    "a tolerance above all": (autoscaling(tolerancePercent=101), "spec.autoscaling.tolerancePercent"),
    "a step of less than nothing": (autoscaling(scaleUp={"stepReplicas": -1}), "spec.autoscaling.scaleUp.stepReplicas"),
    "removing more than all": (autoscaling(scaleDown={"stepPercent": 101}), "spec.autoscaling.scaleDown.stepPercent"),
    "no token at all": (engine(maxModelLen=0), "spec.engine.maxModelLen"),
    "more sequences than any step": (engine(maxNumSeqs=4096), "spec.engine.maxNumSeqs"),
    "no sequence at all": (engine(maxNumSeqs=0), "spec.engine.maxNumSeqs"),
    "a block of 17": (engine(blockSize=17), "spec.engine.blockSize"),
    "all of the memory": (engine(gpuMemoryUtilization=1.0), "spec.engine.gpuMemoryUtilization"),
    "none of the memory": (engine(gpuMemoryUtilization=0), "gpuMemoryUtilization"),
    "swap of less than nothing": (engine(swapSpaceGiB=-1), "spec.engine.swapSpaceGiB"),
    "a budget below a block": (engine(maxNumBatchedTokens=1), "spec.engine.maxNumBatchedTokens"),
    "GPUs below zero": (gpu(count=-1, product="l4"), "spec.resources.gpu.count"),
    "more GPUs than a node has": (gpu(count=17, product="l4"), "spec.resources.gpu.count"),
    "a GPU without memory": (gpu(count=1, product="l4", memoryGiB=0), "spec.resources.gpu.memoryGiB"),
    # words that mean nothing
    "an unknown dtype": (model(dtype="int3"), "spec.model.dtype"),
    "an unknown KV dtype": (engine(kvCacheDtype="fp2"), "spec.engine.kvCacheDtype"),
    "an unknown source of metrics": (autoscaling(metrics={"source": "tea leaves"}), "spec.autoscaling.metrics.source"),
    "a target in words": ({"slo": {"ttftP99": "fast"}}, "spec.slo.ttftP99"),
    "a target without a unit": ({"slo": {"ttftP99": "2"}}, "spec.slo.ttftP99"),
    "a target of less than nothing": ({"slo": {"ttftP99": "-2s"}}, "spec.slo.ttftP99"),
    "a drain of for ever": ({"drainTimeout": "inf"}, "spec.drainTimeout"),
    "memory in words": (amounts(memory="lots"), "spec.resources.requests.memory"),
    "cores below zero": (amounts(cpu="-1"), "spec.resources.requests.cpu"),
    "surge in words": ({"rollout": {"maxSurge": "some"}}, "spec.rollout.maxSurge"),
    "surge below zero": ({"rollout": {"maxSurge": -1}}, "spec.rollout.maxSurge"),
    "an unknown scheme": (uri("ftp://example/model"), "spec.model"),
    "no scheme": (uri("tiny-llama"), "spec.model"),
    "a path that is not absolute": (uri("file://tiny"), "spec.model"),
    "an hf uri without a name": (uri("hf://org"), "spec.model"),
    # contradictions
    "GPU-hours of a CPU": (autoscaling(maxGPUHoursPerDay=40), "spec"),
    "replicas beside autoscaling": (autoscaling() | {"replicas": 2}, "spec"),
    "min above max": (autoscaling(minReplicas=4), "spec.autoscaling"),
    "an idle time without going to zero": (autoscaling(idleTimeout="5m"), "spec.autoscaling"),
    "no surge and nothing unavailable": ({"rollout": {"maxSurge": 0, "maxUnavailable": 0}}, "spec.rollout"),
    "a GPU of no product": (gpu(count=1), "spec.resources"),
    "MIG of unknown memory": (gpu(product="h100-80gb", resourceName="nvidia.com/mig-1g.10gb"), "spec.resources"),
    "a GPU that nothing requests": (gpu(product="l4", resourceName=""), "spec"),
    "more GPUs than one": (gpu(count=2, product="l4"), "spec.resources"),
    "memory of nothing": (amounts(memory="0"), "spec.resources"),
    "memory for no server": (amounts(memory="64Mi"), "spec.resources"),
    "more memory than allowed": ({"resources": {"limits": {"memory": "1Gi"}}}, "spec.resources"),
    "more cores than allowed": ({"resources": {"limits": {"cpu": "500m"}}}, "spec.resources"),
    "expected more than possible": (
        engine(maxModelLen=100, sizing={"expectedTokens": 200}),
        "spec.engine",
    ),
    "a cache for what is on a volume": (model(uri="pvc://claim/a", cache={"claimName": "c"}), "spec.model"),
    "two revisions": (model(uri="hf://org/a@v1", revision="v2"), "spec.model"),
    "a store without a scheme": (model(uri="s3://bucket/a", s3={"endpoint": "minio:9000"}), "spec.model.s3.endpoint"),
    "no step at all": (autoscaling(scaleUp={"stepReplicas": 0, "stepPercent": 0}), "spec.autoscaling.scaleUp"),
    # huge
    "a huge uri": (uri(f"hf://org/{LONG}"), "spec.model.uri"),
    "a huge served name": (model(servedName=LONG), "spec.model.servedName"),
    "a huge env value": (env({"name": "A", "value": LONG}), "spec.podTemplate.env[0].value"),
    "a huge label": (pod(labels={"a": LONG}), "spec.podTemplate.labels"),
    "a huge duration": ({"drainTimeout": "9" * 5000 + "s"}, "spec.drainTimeout"),
    "a huge quantity": (amounts(memory="9" * 5000), "spec.resources.requests.memory"),
    "many labels": (pod(labels={f"k{n}": "v" for n in range(1000)}), "spec.podTemplate.labels"),
    "many variables": (pod(env=[{"name": f"A{n}"} for n in range(1000)]), "spec.podTemplate.env"),
    "many tolerations": ({"scheduling": {"tolerations": [{"key": "a"}] * 1000}}, "spec.scheduling.tolerations"),
    # control characters and injections
    "a served name with a line feed": (model(servedName="a\nb"), "spec.model.servedName"),
    "a served name with a NUL": (model(servedName="a\x00b"), "spec.model.servedName"),
    "a served name with an escape": (model(servedName="\x1b[2Ja"), "spec.model.servedName"),
    "a served name for a shell": (model(servedName=SHELL), "spec.model.servedName"),
    "a served name for PromQL": (model(servedName=PROMQL), "spec.model.servedName"),
    "a served name that is a flag": (model(servedName="--trust-remote-code"), "spec.model.servedName"),
    "a uri with a NUL": (uri("hf://org/na\x00me"), "spec.model"),
    "a uri with a line feed": (uri("pvc://claim/a\nb"), "spec.model"),
    "a product for a shell": (gpu(count=1, product=SHELL), "spec.resources.gpu.product"),
    "a product for PromQL": (gpu(count=1, product=PROMQL), "spec.resources.gpu.product"),
    "a variable for a shell": (env({"name": "A;id", "value": "x"}), "spec.podTemplate.env[0].name"),
    "a secret for a shell": (model(secretRef={"name": SHELL}), "spec.model.secretRef.name"),
    "a label value for PromQL": (pod(labels={"team": PROMQL}), "spec.podTemplate.labels"),
    "a label value with a line feed": (pod(labels={"team": "a\nb"}), "spec.podTemplate.labels"),
    "a duration with a line feed": ({"drainTimeout": "60s\n"}, "spec.drainTimeout"),
}

BAD_NAMES: dict[str, str] = {
    "a name for a shell": "a;rm -rf",
    "a name for PromQL": 'a"} or up{x="',
    "a name with a line feed": "a\nb",
    "a name that is a path": "../../secrets",
    "a name that begins with a digit": "1st",
    "a name that is two labels": "with.dot",
    "a name too long for a Service": "a" * 53,
}

CONDITIONED: dict[str, tuple[Spec, str, str]] = {
    "no such folder": (uri("file:///no-such-model"), "SizingValid", "no-such-model"),
    "out of the folder": (uri("file:///../etc"), "SizingValid", "leaves the folder of file:// models"),
    "no such GPU": (gpu(count=1, product="h1000"), "SizingValid", "h1000"),
    "more than there is": (
        {"engine": {"maxModelLen": 2048}, "resources": {"requests": {"memory": "520Mi"}}},
        "SizingValid",
        "memory",
    ),
    "longer than the model": (engine(maxModelLen=9_000_000), "SizingValid", "9000000"),
    "an hf uri for a shell": (uri(f"hf://org/{SHELL}"), "SizingValid", "correct model.uri"),
    "an hf uri that climbs": (uri("hf://org/../../etc"), "SizingValid", "correct model.uri"),
    "a bucket for a shell": (uri("s3://Bucket;id/model"), "SizingValid", "model.uri"),
    "a claim that climbs": (uri("pvc://claim/../../etc"), "SizingValid", "correct model.uri"),
    "an image with a flag": (uri("oci://registry/model --privileged"), "SizingValid", "is not oci://"),
    "a path for a kubelet": (uri("pvc://claim/$(SECRET)"), "SizingValid", "correct model.uri"),
}

LITERAL: dict[str, Spec] = {
    "an env value for a shell": env({"name": "A", "value": SHELL}),
    "an env value for PromQL": env({"name": "A", "value": PROMQL}),
    "an annotation for a shell": pod(annotations={"note": SHELL}),
    "an annotation with line feeds": pod(annotations={"note": "a\nb\x1b[2J"}),
}
