{{- define "llmservice.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 50 | trimSuffix "-" -}}
{{- else -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- if contains $name .Release.Name -}}
{{- .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 50 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/*
Labels that select a component's pods. Takes a list: the root, the component. The name is not `llmservice`: that one is
carried by the pods of every LLMService, and one called as the release is would otherwise select the gateway's pods too.
*/}}
{{- define "llmservice.selector" -}}
app.kubernetes.io/name: {{ default (index . 0).Chart.Name (index . 0).Values.nameOverride }}-{{ index . 1 }}
app.kubernetes.io/instance: {{ (index . 0).Release.Name }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end -}}

{{/* A version as labels and tags of images can have it: Flux puts build metadata behind a plus sign. */}}
{{- define "llmservice.version" -}}
{{- . | replace "+" "_" | trunc 63 | trimSuffix "-" -}}
{{- end -}}

{{- define "llmservice.labels" -}}
{{ include "llmservice.selector" . }}
app.kubernetes.io/part-of: llmservice
app.kubernetes.io/version: {{ include "llmservice.version" (index . 0).Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ (index . 0).Release.Service }}
helm.sh/chart: {{ printf "%s-%s" (index . 0).Chart.Name (index . 0).Chart.Version | include "llmservice.version" }}
{{- with (index . 0).Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "llmservice.pullSecrets" -}}
{{- with .Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- end -}}

{{/* An image's full name. Takes a list: the root, the repository. */}}
{{- define "llmservice.image" -}}
{{- $image := (index . 0).Values.image -}}
{{- with $image.registry }}{{ trimSuffix "/" . }}/{{ end -}}
{{ index . 1 }}:{{ default (include "llmservice.version" (index . 0).Chart.AppVersion) $image.tag }}
{{- end -}}

{{/* Where a component's pods run. Takes a list: the root, the component, whose values say so. */}}
{{- define "llmservice.scheduling" -}}
{{- $values := index (index . 0).Values (index . 1) -}}
topologySpreadConstraints:
  {{- if $values.topologySpreadConstraints }}
  {{- toYaml $values.topologySpreadConstraints | nindent 2 }}
  {{- else }}
  - maxSkew: 1
    topologyKey: kubernetes.io/hostname
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels:
        {{- include "llmservice.selector" . | nindent 8 }}
  {{- end }}
{{- range $field := list "nodeSelector" "tolerations" "affinity" "priorityClassName" }}
{{- with index $values $field }}
{{ $field }}:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}
{{- end -}}

{{/*
Whether the webhook is installed. An operator without cluster-wide rights can't give it a certificate: cert-manager must.
*/}}
{{- define "llmservice.admission" -}}
{{- if and .Values.admission.enabled (or (not .Values.namespaces) .Values.admission.certManager.enabled) }}true{{ end -}}
{{- end -}}

{{/* Pod Security Standards: restricted. */}}
{{- define "llmservice.podSecurityContext" -}}
runAsNonRoot: true
runAsUser: 65532
runAsGroup: 65532
fsGroup: 65532
seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{- define "llmservice.securityContext" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
runAsNonRoot: true
capabilities: {drop: [ALL]}
{{- end -}}

{{/* What the operator may do with LLMServices and their children, wherever it may do it. */}}
{{- define "llmservice.operatorRules" -}}
- apiGroups: [serving.llmservice.io]
  resources: [llmservices]
  verbs: [list, watch]
- apiGroups: [serving.llmservice.io]
  resources: [llmservices/status]
  verbs: [patch]
- apiGroups: [serving.llmservice.io]  # owner references that block the owner's deletion need it where admission checks them
  resources: [llmservices/finalizers]
  verbs: [update]
- apiGroups: [apps]
  resources: [deployments]
  verbs: [get, list, watch, create, patch]
- apiGroups: [""]
  resources: [services, serviceaccounts]
  verbs: [get, list, watch, create, patch]
- apiGroups: [""]  # the lists of LoRA adapters; delete: what the spec can turn off
  resources: [configmaps]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [policy]
  resources: [poddisruptionbudgets]
  verbs: [get, list, watch, create, patch]
- apiGroups: [networking.k8s.io]  # delete: what the spec can turn off
  resources: [networkpolicies]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [monitoring.coreos.com]
  resources: [podmonitors, prometheusrules]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [inference.networking.k8s.io]
  resources: [inferencepools]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [""]  # patch: the deletion cost that decides which pod goes first; templates/pod-patches.yaml denies more
  resources: [pods]
  verbs: [list, watch, patch]
- apiGroups: [""]
  resources: [events]
  verbs: [create, patch]
{{- if not .Values.namespaces }}
- apiGroups: [""]  # their annotation lists the Secrets that LLMServices may name
  resources: [namespaces]
  verbs: [get]
{{- end }}
{{- end -}}

{{/* Whether pods refuse what the gateway has not signed. */}}
{{- define "llmservice.signaturesRequired" -}}
{{- $keys := .Values.gateway.keys -}}
{{- if and .Values.gateway.enabled $keys.signingSecretName $keys.signaturesRequired }}true{{ end -}}
{{- end -}}

{{/* Refuses keys of the cluster that have a monthly budget, where nothing could count it. */}}
{{- define "llmservice.refuseBudgets" -}}
{{- range (lookup "v1" "Secret" .Release.Namespace "").items -}}
{{- if eq (dig "labels" "serving.llmservice.io/api-key" "" .metadata) "true" -}}
{{- if (dig "data" "policy.yaml" "" . | b64dec | fromYaml).monthlyTokens -}}
{{- fail (printf "the API key %s has a monthly budget, which needs Redis: set gateway.keys.redis.secretName, or remove monthlyTokens from its policy.yaml" .metadata.name) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "llmservice.gatewayRules" -}}
- apiGroups: [serving.llmservice.io]
  resources: [llmservices]
  verbs: [list, watch]
- apiGroups: [""]
  resources: [pods]
  verbs: [list, watch]
{{- end -}}

{{/*
Rules and their binding: one ClusterRole, or a Role in each followed namespace.
Takes a dict: root, component, rules.
*/}}
{{- define "llmservice.rbac" -}}
{{- $root := .root -}}
{{- $name := printf "%s-%s" (include "llmservice.fullname" $root) .component -}}
{{- $labels := include "llmservice.labels" (list $root .component) -}}
{{- $rules := .rules -}}
{{- $kind := ternary "Role" "ClusterRole" (gt (len $root.Values.namespaces) 0) -}}
{{- range ($root.Values.namespaces | default (list "")) }}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: {{ $kind }}
metadata:
  name: {{ $name }}
  {{- with . }}
  namespace: {{ . }}
  {{- end }}
  labels:
    {{- $labels | nindent 4 }}
rules:
  {{- $rules | nindent 2 }}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: {{ $kind }}Binding
metadata:
  name: {{ $name }}
  {{- with . }}
  namespace: {{ . }}
  {{- end }}
  labels:
    {{- $labels | nindent 4 }}
roleRef:
  apiGroup: rbac.authorization.k8s.io
  kind: {{ $kind }}
  name: {{ $name }}
subjects:
  - kind: ServiceAccount
    name: {{ $name }}
    namespace: {{ $root.Release.Namespace }}
{{- end }}
{{- end -}}
