{{/* The two worker groups. */}}

{{- define "llm42.fastPathGroup" -}}
{{- $v := .Values -}}
{{- $places := ternary (add1 $v.fastPath.gpu.count) 1 (gt (int $v.fastPath.hosts) 1) -}}
- groupName: fast-path
  {{- include "llm42.groupSize" $v.fastPath | trim | nindent 2 }}
  numOfHosts: {{ $v.fastPath.hosts }}
  {{- include "llm42.groupBody" (dict "root" . "values" $v.fastPath "component" "fast-path" "places" $places) | nindent 2 }}
{{- end -}}

{{- define "llm42.verifierGroup" -}}
- groupName: verifier
  {{- include "llm42.groupSize" .Values.verifier | trim | nindent 2 }}
  {{- include "llm42.groupBody" (dict "root" . "values" .Values.verifier "component" "verifier" "places" 1) | nindent 2 }}
{{- end -}}

{{/*
The pods announce to Ray what they have a place for: a replica (across nodes, its parts), a verifier, an ingress. Each of these asks
for one (_config.tpl), so a pod has at most one of a kind, and none that is not meant for it.
*/}}
{{- define "llm42.places" -}}
{{- $v := .root.Values -}}
{{- $places := dict -}}
{{- if eq .component "fast-path" -}}{{- $_ := set $places "llm42_fast_path" (int .places) -}}{{- end -}}
{{- if or (eq .component "verifier") (not $v.verifier.dedicated) -}}{{- $_ := set $places "llm42_verifier" 1 -}}{{- end -}}
{{- if or (eq .component "fast-path") $v.verifier.ingress -}}{{- $_ := set $places "llm42_ingress" 1 -}}{{- end -}}
{{- toJson $places -}}
{{- end -}}

{{- define "llm42.groupBody" -}}
{{- $role := include "llm42.role" . | fromYaml -}}
{{- $own := dict "resources" (printf "'%s'" (include "llm42.places" .)) -}}
rayStartParams:
  {{- toYaml (merge (default dict $role.rayStartParams) $own) | nindent 2 }}
template:
  {{- include "llm42.podTemplate" (dict "root" .root "role" $role "component" .component) | nindent 2 }}
{{- end -}}

{{/* Where Ray's autoscaler runs, `replicas` is its own: left out, nobody who compares (Argo CD, Flux) takes it back. */}}
{{- define "llm42.groupSize" -}}
{{- $range := include "llm42.range" . | fromYaml -}}
{{- if not .autoscaling.enabled }}
replicas: {{ $range.least }}
{{- end }}
minReplicas: {{ $range.least }}
maxReplicas: {{ $range.most }}
{{- end -}}
