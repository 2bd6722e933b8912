{{/* Pod templates of head and workers. Arguments: root, role (its values, merged with `common`), component. */}}

{{/* `common` and one role's values: maps merged, the role winning; lists joined. */}}
{{- define "llm42.role" -}}
{{- $role := mustMergeOverwrite (deepCopy .root.Values.common) (deepCopy .values) -}}
{{- range list "tolerations" "topologySpreadConstraints" "hostAliases" "env" "envFrom" "volumes" "volumeMounts" "initContainers" "sidecars" -}}
{{- $_ := set $role . (concat (get $.root.Values.common .) (default list (get $.values .))) -}}
{{- end -}}
{{- /* a handler, a probe: one of them, not the keys of both */ -}}
{{- range $key := list "preStop" "livenessProbe" "dnsConfig" -}}
{{- with get $.values $key -}}{{- $_ := set $role $key . -}}{{- end -}}
{{- end -}}
{{- toYaml $role -}}
{{- end -}}

{{- define "llm42.podTemplate" -}}
{{- $v := .root.Values -}}
{{- $head := eq .component "head" -}}
metadata:
  labels:
    {{- include "llm42.podLabels" . | nindent 4 }}
    {{- with .role.labels }}{{ toYaml . | nindent 4 }}{{ end }}
  annotations:
    llm42/cluster-inputs: {{ include "llm42.clusterInputs" . | quote }}
    {{- if $head }}
    # A file in the head's home directory. Where Ray finds no description of its cluster there, it asks the cloud's metadata
    # addresses for one at every start, although usage statistics are off. An empty one will do. Not from a ConfigMap: KubeRay's
    # job that cleans Redis up is a copy of this pod, and starts when Helm has deleted ours.
    llm42/ray-bootstrap-config: "{}"
    {{- end }}
    {{- if $v.upgrade.newClusterOnFingerprintChange }}
    llm42/fingerprint-inputs: {{ include "llm42.fingerprintInputs" .root | quote }}
    {{- end }}
    {{- with .role.annotations }}{{ toYaml . | nindent 4 }}{{ end }}
spec:
  {{- /* the job that cleans Redis up has the head's account, and outlives the chart's */}}
  {{- $kept := and $head $v.gcsFaultTolerance.enabled $v.serviceAccount.create (ne (include "llm42.scales" .root) "true") }}
  serviceAccountName: {{ ternary "default" (include "llm42.serviceAccountName" .root) $kept }}
  automountServiceAccountToken: {{ and $head (eq (include "llm42.scales" .root) "true") }}
  terminationGracePeriodSeconds: {{ include "llm42.graceSeconds" . }}
  {{- with $v.image.pullSecrets }}
  imagePullSecrets:
    {{- range . }}
    - name: {{ . }}
    {{- end }}
  {{- end }}
  securityContext:
    {{- toYaml $v.podSecurityContext | nindent 4 }}
  {{- with include "llm42.placement" . | trim }}{{ . | nindent 2 }}{{ end }}
  {{- if or (and (not $head) (eq $v.model.source "huggingface")) .role.initContainers }}
  initContainers:
    {{- if and (not $head) (eq $v.model.source "huggingface") }}
    {{- include "llm42.fetchContainer" .root | nindent 4 }}
    {{- end }}
    {{- with .role.initContainers }}{{ toYaml . | nindent 4 }}{{ end }}
  {{- end }}
  containers:
    - {{ include "llm42.rayContainer" . | nindent 6 | trim }}
    {{- with .role.sidecars }}{{ toYaml . | nindent 4 }}{{ end }}
  volumes:
    {{- include "llm42.volumes" . | nindent 4 }}
{{- end -}}

{{/*
What KubeRay does not look at when it decides on a new cluster: tolerations, and fixed numbers of pods. As an annotation of the pods
it does. The bounds of a group that scales are left out: a second cluster for them would begin at the least number. An empty list hashes like none, so that a release without tolerations is no other one.
*/}}
{{- define "llm42.clusterInputs" -}}
{{- $inputs := dict "tolerations" (default list .role.tolerations) -}}
{{- if .root.Values.upgrade.newClusterOnScale -}}
{{- $sizes := list (include "llm42.fixedSize" .root.Values.fastPath) -}}
{{- if .root.Values.verifier.dedicated -}}{{- $sizes = append $sizes (include "llm42.fixedSize" .root.Values.verifier) -}}{{- end -}}
{{- $_ := set $inputs "sizes" $sizes -}}
{{- end -}}
{{- toJson $inputs | sha256sum | trunc 16 -}}
{{- end -}}

{{/*
The end of a pod. A worker waits until endpoints know; then Ray drains its node (RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S) for as long
as Serve waits for streams, and half a minute more in which successors may start. It ends before that when nothing is left on it.
The head outlives the workers: where all go at once, it is still Serve that ends the replicas.
*/}}
{{- define "llm42.preStopSeconds" -}}
{{- ternary (add 20 (int (include "llm42.nodeDrainSeconds" .root))) 10 (eq .component "head") -}}
{{- end -}}

{{- define "llm42.nodeDrainSeconds" -}}
{{- add 30 (int (include "llm42.drainSeconds" .)) -}}
{{- end -}}

{{- define "llm42.graceSeconds" -}}
{{- $own := .role.terminationGracePeriodSeconds -}}
{{- $most := add 10 (int (include "llm42.nodeDrainSeconds" .root)) (ternary 40 30 (eq .component "head")) -}}
{{- ternary $most $own (kindIs "invalid" $own) | int -}}
{{- end -}}

{{- define "llm42.placement" -}}
{{- $role := deepCopy .role -}}
{{- if and .role.hostNetwork (not .role.dnsPolicy) -}}{{- $_ := set $role "dnsPolicy" "ClusterFirstWithHostNet" -}}{{- end -}}
{{- if .role.hostNetwork }}
hostNetwork: true
{{- end }}
{{- range $key := list "nodeSelector" "tolerations" "affinity" "priorityClassName" "runtimeClassName" "schedulerName" "dnsPolicy" "dnsConfig" "hostAliases" }}
{{- with get $role $key }}
{{ $key }}:{{ if kindIs "string" . }} {{ . }}{{ else }}{{ toYaml . | nindent 2 }}{{ end }}
{{- end }}
{{- end }}
{{- with .role.topologySpreadConstraints }}
topologySpreadConstraints:
  {{- range . }}
  {{- $own := dict "matchLabels" (include "llm42.podLabels" $ | fromYaml) }}
  - {{ toYaml (ternary . (set (deepCopy .) "labelSelector" $own) (hasKey . "labelSelector")) | nindent 4 | trim }}
  {{- end }}
{{- end }}
{{- end -}}

{{- define "llm42.rayContainer" -}}
{{- $v := .root.Values -}}
{{- $head := eq .component "head" -}}
name: {{ ternary "ray-head" "ray-worker" $head }}
image: {{ include "llm42.image" .root }}
imagePullPolicy: {{ $v.image.pullPolicy }}
securityContext:
  {{- toYaml $v.containerSecurityContext | nindent 2 }}
ports:
  {{- if $head }}
  - {name: gcs-server, containerPort: 6379}
  - {name: dashboard, containerPort: 8265}
  - {name: as-metrics, containerPort: 44217}
  - {name: dash-metrics, containerPort: 44227}
  {{- end }}
  - {name: serve, containerPort: {{ $v.serve.port }}}
  - {name: metrics, containerPort: 8080}
  {{- if $v.serve.haProxy.enabled }}
  - {name: proxy-metrics, containerPort: 9101}
  {{- end }}
env:
  {{- include "llm42.env" . | trim | nindent 2 }}
{{- with .role.envFrom }}
envFrom:
  {{- toYaml . | nindent 2 }}
{{- end }}
resources:
  {{- include "llm42.resources" . | nindent 2 }}
volumeMounts:
  {{- include "llm42.mounts" . | nindent 2 }}
  {{- with .role.volumeMounts }}{{ toYaml . | nindent 2 }}{{ end }}
lifecycle:
  preStop:
    {{- with .role.preStop }}
    {{- toYaml . | nindent 4 }}
    {{- else }}
    exec:
      command: [sleep, {{ include "llm42.preStopSeconds" . | quote }}]
    {{- end }}
{{- with .role.livenessProbe }}
livenessProbe:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- if not $head }}
readinessProbe:
  exec:
    command:
      - python3
      - /opt/llm42/scripts/readiness.py
      - --port={{ $v.serve.port }}
      - --require={{ $v.readiness.require }}
  initialDelaySeconds: {{ $v.readiness.initialDelaySeconds }}
  periodSeconds: {{ $v.readiness.periodSeconds }}
  timeoutSeconds: {{ $v.readiness.timeoutSeconds }}
  failureThreshold: {{ $v.readiness.failureThreshold }}
{{- end }}
{{- end -}}

{{/*
Ray's switches are those of `llm42 serve` (deployments/llm42_serve/launch.py), apart from HAProxy, which a cluster may choose. The role's own
variables win; a name may stand only once in a list that the API server keys by name.
What pods say to each other and to themselves goes past any proxy (llm42/host/direct.py): a role's own exceptions are added to. Where
the environment comes from `envFrom`, no_proxy is left to it: a variable here would hide its own.
Statistics that are switched off make Ray report just that: to nobody.
*/}}
{{- define "llm42.env" -}}
{{- $proxy := ternary "1" "0" .root.Values.serve.haProxy.enabled -}}
{{- $cache := "/var/cache/llm42" -}}
{{- $defaults := dict
  "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S" (ternary "0" (include "llm42.nodeDrainSeconds" .root) (eq .component "head"))
  "RAY_ROTATION_MAX_BYTES" "104857600"
  "RAY_ROTATION_BACKUP_COUNT" "3"
  "RAY_USAGE_STATS_ENABLED" "0"
  "RAY_USAGE_STATS_REPORT_URL" "http://127.0.0.1:9/"
  "RAY_SERVE_THROUGHPUT_OPTIMIZED" "1"
  "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH" "llm42_serve.ingress.proxy_replies:middlewares"
  "RAY_SERVE_ENABLE_HA_PROXY" $proxy
  "RAY_SERVE_ENABLE_DIRECT_INGRESS" $proxy
  "RAY_worker_niceness" "0"
  "RAY_metrics_report_interval_ms" "2500"
  "RAY_task_events_max_num_task_in_gcs" "10000"
  "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO" "0"
  "HOME" "/home/llm42"
  "HF_HUB_OFFLINE" "1"
  "VLLM_USE_FLASHINFER_SAMPLER" "0"
  "TRITON_CACHE_DIR" (printf "%s/triton" $cache)
  "TORCHINDUCTOR_CACHE_DIR" (printf "%s/inductor" $cache)
  "FLASHINFER_WORKSPACE_BASE" (printf "%s/flashinfer" $cache)
  "CUDA_CACHE_PATH" (printf "%s/cuda" $cache)
  "VLLM_CACHE_ROOT" (printf "%s/vllm" $cache) -}}
{{- /* the image asks for all; where nvidia's is the node's runtime, the head would see and count GPUs that are not its own */ -}}
{{- if eq .component "head" -}}{{- $_ := set $defaults "NVIDIA_VISIBLE_DEVICES" "void" -}}{{- end -}}
{{- $env := dict -}}
{{- range $name, $value := $defaults -}}
{{- $_ := set $env $name (dict "name" $name "value" $value) -}}
{{- end -}}
{{- range .role.env -}}
{{- $_ := set $env .name . -}}
{{- end -}}
{{- $direct := dict "no_grpc_proxy" "0.0.0.0/0,::/0,localhost" -}}
{{- if not .role.envFrom -}}
{{- $_ := set $direct "no_proxy" "localhost,127.0.0.1,::1" -}}
{{- $_ := set $direct "NO_PROXY" "localhost,127.0.0.1,::1" -}}
{{- end -}}
{{- range $name, $value := $direct -}}
{{- $own := default dict (get $env $name) -}}
{{- if not (hasKey $own "valueFrom") -}}
{{- $_ := set $env $name (dict "name" $name "value" (list $own.value $value | compact | join ",")) -}}
{{- end -}}
{{- end -}}
{{- range $name := keys $env | sortAlpha }}
- {{ toYaml (get $env $name) | nindent 2 | trim }}
{{- end -}}
{{- end -}}

{{- define "llm42.resources" -}}
{{- $resources := deepCopy .role.resources -}}
{{- with .role.gpu -}}
{{- if .count -}}
{{- $limits := default dict $resources.limits -}}
{{- $_ := set $limits .resourceName .count -}}
{{- $_ := set $resources "limits" $limits -}}
{{- end -}}
{{- end -}}
{{- toYaml $resources -}}
{{- end -}}

{{- define "llm42.mounts" -}}
- {name: tmp, mountPath: /tmp}
- {name: home, mountPath: /home/llm42}
- {name: cache, mountPath: /var/cache/llm42}
{{- if eq .component "head" }}
- {name: bootstrap, mountPath: /home/llm42/ray_bootstrap_config.yaml, subPath: ray_bootstrap_config.yaml, readOnly: true}
{{- else }}
- {name: scripts, mountPath: /opt/llm42/scripts, readOnly: true}
{{- end }}
{{- if and (ne .component "head") .root.Values.apiKeys.secretName }}
- {name: api-keys, mountPath: /etc/llm42/keys, readOnly: true}
{{- end }}
{{- if and (ne .component "head") (ne .root.Values.model.source "image") }}
- {name: model, mountPath: /models, readOnly: true{{ with .root.Values.model.pvc.subPath }}{{ if eq $.root.Values.model.source "pvc" }}, subPath: {{ . | quote }}{{ end }}{{ end }}}
{{- end }}
{{- end -}}

{{- define "llm42.volumes" -}}
{{- $v := .root.Values -}}
{{- $head := eq .component "head" -}}
- {name: tmp, emptyDir: {{ toJson $v.scratch.tmp }}}
- {name: home, emptyDir: {{ toJson $v.scratch.home }}}
- name: cache
  {{- ternary "emptyDir: {}" (include "llm42.cacheVolume" .root) $head | nindent 2 }}
{{- if $head }}
- name: bootstrap
  downwardAPI: {items: [{path: ray_bootstrap_config.yaml, fieldRef: {fieldPath: "metadata.annotations['llm42/ray-bootstrap-config']"}}]}
{{- else }}
- name: scripts
  configMap: {name: {{ include "llm42.fullname" .root }}-scripts}
{{- with $v.apiKeys.secretName }}
- name: api-keys
  secret: {secretName: {{ . }}}
{{- end }}
{{- if eq $v.model.source "pvc" }}
- name: model
  persistentVolumeClaim: {claimName: {{ $v.model.pvc.claimName }}, readOnly: true}
{{- else if eq $v.model.source "hostPath" }}
- name: model
  hostPath: {path: {{ $v.model.hostPath.path | quote }}, type: Directory}
{{- else if eq $v.model.source "huggingface" }}
- name: model
  {{- include "llm42.modelVolume" .root | nindent 2 }}
{{- end }}
{{- end }}
{{- with .role.volumes }}
{{ toYaml . }}
{{- end }}
{{- end -}}
