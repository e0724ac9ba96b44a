"""What to do about it: a sentence for every reason that a condition can have.

A condition's message says what happened in this case; a remedy says where to look and what to change.
"""

from __future__ import annotations

_PODS = "kubectl describe pods -n {namespace} -l app.kubernetes.io/instance={name}"
_LOGS = "kubectl logs -n {namespace} deploy/{name} --previous"

_REMEDIES = {
    # the service is on its way
    "Starting": "Wait: pods load the model. If it takes much longer than before, look at {pods}",
    "FetchingModel": "Wait: the pods download the checkpoint; status.model.fetch says how far they are.",
    "PartlyReady": "Wait: some replicas still load the model. They count as soon as /ready answers.",
    "RollingOut": "Wait: the new pods load the model; what ran before serves meanwhile.",
    "Updating": "Wait a moment; if it stays so, the cluster's deployment controller is not working.",
    "Replacing": "Wait: the objects of the deleted service of that name are being removed.",
    "ScaledToZero": "Raise it: kubectl scale llm {name} -n {namespace} --replicas=1",
    "NotReconciled": "See that the operator runs and follows this namespace:"
    " kubectl get pods -A -l app.kubernetes.io/component=operator",
    "BehindSpec": "Wait a moment; if it stays so, see the operator's log.",
    # pods
    "Unschedulable": "Free or add a node with such a card, or ask for less in spec.resources and spec.scheduling."
    " Details: {pods}",
    "ImagePullBackOff": "Check the operator's --server-image and spec.podTemplate.imagePullSecrets. Details: {pods}",
    "OOMKilled": "Raise spec.resources.limits.memory and requests.memory, or lower spec.engine.maxModelLen.",
    "Killed": "See who killed it: {pods}, and the node's log. Memory is the usual reason.",
    "EngineFailed": "Read the log of the pod that ended, and report what you find: {logs}",
    "CrashLoopBackOff": "Read the log of the pod that ended: {logs}",
    "ModelLoadFailed": "Correct what the server names, in the checkpoint or in spec.engine. Its log: {logs}",
    "ModelFetchFailed": "Check spec.model.uri, spec.model.secretRef and the pods' way to the source"
    " (a proxy belongs into spec.networkPolicy.to):"
    " kubectl logs -n {namespace} deploy/{name} -c fetch",
    "CreateContainerConfigError": "Create the Secret or ConfigMap that is named, or correct the reference in the spec.",
    "CreateContainerError": "The node can't make the container: {pods}",
    "RunContainerError": "The node can't start the container: {pods}",
    "QuotaExceeded": "Raise the namespace's ResourceQuota, or ask for less: kubectl describe quota -n {namespace}",
    "AdmissionDenied": "Ask whoever owns the policy that is named, or change what it objects to in the spec.",
    "FailedCreate": "See why: kubectl describe replicasets -n {namespace} -l app.kubernetes.io/instance={name}",
    "ProgressDeadlineExceeded": "The new pods never became ready. Undo the last change of the spec, or look at {pods}",
    # children
    "NameConflict": "Rename this service, or delete the object that has its name.",
    "SecretNotAllowed": "Annotate the Namespace as the message says, or leave the Secret out: docs/security.md",
    "EnvNotAllowed": "Leave the variable out, or have it added to the chart's operator.allowedEnv.",
    "NameTaken": "Use the name with the namespace before it, or set another spec.model.servedName.",
    "ApplyFailed": "Correct what the API server objects to; for a missing permission see the operator's role.",
    "ServingEarlierSpec": "Correct the spec; what ran before goes on serving meanwhile.",
    # sizing
    "InvalidSpec": "Correct the fields that are named; kubectl explain llmservice.spec tells of each.",
    "DoesNotFit": "Take one of the remedies that are named, or compare cards: llmservice plan --help",
    "UnknownGPU": "Correct spec.resources.gpu.product: llmservice plan --list-gpus shows those known.",
    "InvalidSizing": "Correct the figure that is named in spec.engine.",
    "Unsupported": "Change the field that is named; the server can't do that yet.",
    "UnsupportedModel": "Choose a model of a family that is named.",
    # model source
    "InvalidURI": "Correct spec.model.uri.",
    "FileModelsDisabled": "Use hf:// or pvc://, or set the chart's operator.fileModelsRoot.",
    "ModelNotFound": "Correct spec.model.uri, or put the model there.",
    "ModelForbidden": "Name the Secret with the hub's token in spec.model.secretRef.",
    "ModelUnreachable": "Check the operator's network, or give the model's figures in spec.model.shape.",
    "ModelUnreadable": "Correct the checkpoint's config.json, or choose another revision.",
    "AwaitingPod": "Wait for the first pod, or give the figures of the model's config.json in spec.model.shape.",
    "ImageVolumesUnsupported": "Turn the feature on in the cluster, or serve the model from hf://, s3:// or pvc://.",
    # scaling and promises
    "NoMetrics": "Replicas are held. See that the operator reaches the pods' port 8001 or Prometheus"
    " (its log says which fails).",
    "NoReadyPods": "Replicas are held until a pod is ready.",
    "SizingInvalid": "Correct the spec first.",
    "ITLUnreachable": "Raise spec.slo.itlP99, or choose a faster card or a smaller model.",
    "UnloadedRequestMissesTarget": "Raise spec.slo.ttftP99, shorten prompts, or choose a faster card or"
    " a smaller model.",
}


def remedy(reason: str, namespace: str, name: str) -> str | None:
    """What to do about a condition's reason; None where nothing is wrong, or where its message says it all."""
    text = _REMEDIES.get(reason)
    if text is None:
        return None
    about = {"namespace": namespace, "name": name}
    return text.format(**about, pods=_PODS.format(**about), logs=_LOGS.format(**about))
