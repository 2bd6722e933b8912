{{/* The two worker groups. */}}

{{- define "llm42.fastPathGroup" -}}
{{- $v := .Values -}}
{{- $places := ternary (add1 $v.fastPath.gpu.count) 1 (gt (int $v.fastPath.hosts) 1) -}}
- groupName: fast-path
  {{- include "llm42.groupSize" $v.fastPath | nindent 2 }}
  numOfHosts: {{ $v.fastPath.hosts }}
  {{- include "llm42.groupBody" (dict "root" . "values" $v.fastPath "component" "fast-path" "resource" "llm42_fast_path" "places" $places) | nindent 2 }}
{{- end -}}

{{- define "llm42.verifierGroup" -}}
- groupName: verifier
  {{- include "llm42.groupSize" .Values.verifier | nindent 2 }}
  {{- include "llm42.groupBody" (dict "root" . "values" .Values.verifier "component" "verifier" "resource" "llm42_verifier" "places" 1) | nindent 2 }}
{{- end -}}

{{/* The pods announce to Ray for which role they are, with that many places; replicas and verifiers ask for one each. */}}
{{- define "llm42.groupBody" -}}
{{- $role := include "llm42.role" . | fromYaml -}}
{{- $own := dict -}}
{{- if .root.Values.verifier.dedicated -}}
{{- $_ := set $own "resources" (printf "'{\"%s\": %d}'" .resource (int .places)) -}}
{{- end -}}
rayStartParams:
  {{- toYaml (merge (default dict $role.rayStartParams) $own) | nindent 2 }}
template:
  {{- include "llm42.podTemplate" (dict "root" .root "role" $role "component" .component) | nindent 2 }}
{{- end -}}

{{/* `replicas` changes by Ray's autoscaler where it runs, so there it is only where to begin. */}}
{{- define "llm42.groupSize" -}}
{{- $range := include "llm42.range" . | fromYaml -}}
replicas: {{ $range.least }}
minReplicas: {{ $range.least }}
maxReplicas: {{ $range.most }}
{{- end -}}
