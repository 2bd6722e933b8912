{{/*
The Serve configuration, from values. `config` is the settings tree of llm42/config/, passed through as it is: a new setting
needs no change here. The chart adds what it alone knows: paths, and numbers of processes.
*/}}

{{- define "llm42.settings" -}}
{{- $v := .Values -}}
{{- $verifiers := ternary $v.verifier $v.fastPath $v.verifier.dedicated -}}
{{- $fast := include "llm42.range" $v.fastPath | fromYaml -}}
{{- $checked := include "llm42.range" $verifiers | fromYaml -}}
{{- $server := dict "ingress_replicas" (int (include "llm42.ingresses" .)) "ingress_resources" (dict "llm42_ingress" 1) "fastpath_replicas" $fast.least "verifiers" $checked.least -}}
{{- /* an ingress that strips its path, by an annotation of its controller, may go on doing so */ -}}
{{- if and $v.ingress.enabled (regexMatch "^(/[A-Za-z0-9._~-]+)+/?$" $v.ingress.path) -}}
{{- $_ := set $server "root_path" (trimSuffix "/" $v.ingress.path) -}}
{{- end -}}
{{- if $v.apiKeys.secretName -}}
{{- $_ := set $server "api_keys_file" (printf "/etc/llm42/keys/%s" $v.apiKeys.key) -}}
{{- end -}}
{{- if $v.fastPath.autoscaling.enabled -}}
{{- $_ := set $server "max_fastpath_replicas" $fast.most -}}
{{- $_ := set $server "target_ongoing_requests" $v.fastPath.autoscaling.targetOngoingRequests -}}
{{- end -}}
{{- if $verifiers.autoscaling.enabled -}}
{{- $_ := set $server "max_verifiers" $checked.most -}}
{{- end -}}
{{- $model := dict "path" (include "llm42.modelPath" .) -}}
{{- if and (eq $v.model.source "huggingface") (not $v.model.path) -}}
{{- /* the directory is named by the commit */ -}}
{{- $_ := set $model "name" (base $v.model.huggingface.repo) -}}
{{- end -}}
{{- $known := dict "model" $model "server" $server -}}
{{- $_ := set $known "engine" (dict "resources" (dict "llm42_fast_path" 1)) -}}
{{- $_ := set $known "verifier" (dict "resources" (dict "llm42_verifier" 1)) -}}
{{- toYaml (mustMergeOverwrite $known (deepCopy $v.config)) -}}
{{- end -}}

{{/*
Options of Serve deployments.
Ingress: one replica a pod. A pod has a Serve proxy as soon as it has a replica of any deployment.
FastPath across nodes: each of its GPUs is asked for together with a place in its own group, or Ray could put one on a verifier's.
*/}}
{{- define "llm42.deployments" -}}
{{- $v := .Values -}}
{{- $all := dict "Ingress" (dict "name" "Ingress" "max_replicas_per_node" 1) -}}
{{- if gt (int $v.fastPath.hosts) 1 -}}
{{- $bundles := list (dict "CPU" 1 "llm42_fast_path" 1) -}}
{{- range until (int (mul $v.fastPath.hosts $v.fastPath.gpu.count)) -}}
{{- $bundles = append $bundles (dict "CPU" 1 "GPU" 1 "llm42_fast_path" 1) -}}
{{- end -}}
{{- $_ := set $all "FastPath" (dict "name" "FastPath" "placement_group_bundles" $bundles "placement_group_strategy" "PACK") -}}
{{- end -}}
{{- range $v.serve.deployments -}}
{{- $_ := set $all .name (mustMergeOverwrite (default dict (get $all .name)) (deepCopy .)) -}}
{{- end -}}
{{- range $name := keys $all | sortAlpha }}
- {{ toYaml (get $all $name) | nindent 2 | trim }}
{{- end -}}
{{- end -}}

{{- define "llm42.serveConfig" -}}
proxy_location: EveryNode
http_options:
  host: 0.0.0.0
  port: {{ .Values.serve.port }}
applications:
  - name: llm42
    route_prefix: /
    import_path: llm42_serve.app:build
    args:
      {{- include "llm42.settings" . | nindent 6 }}
    deployments:
      {{- include "llm42.deployments" . | trim | nindent 6 }}
{{- end -}}

{{/* A hash over what a fingerprint may depend on, as far as the chart knows it. */}}
{{- define "llm42.fingerprintInputs" -}}
{{- $v := .Values -}}
{{- $inputs := dict "image" (include "llm42.image" .) "model" (include "llm42.modelIdentity" . | fromJson) "settings" (pick $v.config "model" "verifier") -}}
{{- toJson $inputs | sha256sum | trunc 16 -}}
{{- end -}}

{{/*
`layout: canonical` as the values that it stands for, set in the values (its argument) before anything reads them: no fast path;
on GPUs, verifiers have pods and a GPU each to themselves.
*/}}
{{- define "llm42.layout" -}}
{{- if eq .layout "canonical" -}}
{{- $engine := default dict .config.engine -}}
{{- if ne (default "canonical" $engine.kind) "canonical" -}}
{{- fail (printf "layout canonical has no fast path, but config.engine.kind is %s: leave one of the two out" $engine.kind) -}}
{{- end -}}
{{- $_ := set .config "engine" (set $engine "kind" "canonical") -}}
{{- if eq (dig "model" "device" "cpu" .config) "cuda" -}}
{{- $_ := set .verifier "dedicated" true -}}
{{- $_ := set .verifier.gpu "count" (max 1 (int .verifier.gpu.count)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
