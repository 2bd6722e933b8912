{{/* Names, labels and small pieces. */}}

{{- define "llm42.fullname" -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else if contains $name .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{/* KubeRay's names for a RayService's service have at most 50 characters, hence 40 above. */}}
{{- define "llm42.serviceName" -}}
{{ include "llm42.fullname" . }}-serve-svc
{{- end -}}

{{- define "llm42.serviceAccountName" -}}
{{- default (ternary (include "llm42.fullname" .) "default" .Values.serviceAccount.create) .Values.serviceAccount.name -}}
{{- end -}}

{{- define "llm42.image" -}}
{{- with .Values.image -}}
{{- if .digest -}}{{ .repository }}@{{ .digest }}{{- else -}}{{ .repository }}:{{ default $.Chart.AppVersion .tag }}{{- end -}}
{{- end -}}
{{- end -}}

{{/* Labels of the chart's own objects. */}}
{{- define "llm42.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{ include "llm42.podLabels" (dict "root" . "component" "") }}
{{- end -}}

{{/*
Labels of pods, by which everything of ours selects them. KubeRay names clusters afresh on every upgrade, so `ray.io/cluster`
would not do; and its services select by app.kubernetes.io/name, so that one is left alone.
*/}}
{{- define "llm42.podLabels" -}}
app.kubernetes.io/part-of: llm42
app.kubernetes.io/instance: {{ .root.Release.Name }}
{{- with .component }}
app.kubernetes.io/component: {{ . }}
{{- end }}
{{- end -}}

{{- define "llm42.scales" -}}
{{- if or .Values.fastPath.autoscaling.enabled (and .Values.verifier.dedicated .Values.verifier.autoscaling.enabled) -}}true{{- end -}}
{{- end -}}

{{/* Fewest and most replicas of a group (its values). */}}
{{- define "llm42.range" -}}
{{- if .autoscaling.enabled -}}
least: {{ .autoscaling.minReplicas }}
most: {{ .autoscaling.maxReplicas }}
{{- else -}}
least: {{ .replicas }}
most: {{ .replicas }}
{{- end -}}
{{- end -}}

{{/* Fewest pods of a group (its values). */}}
{{- define "llm42.minPods" -}}
{{- mul (include "llm42.range" . | fromYaml).least (default 1 .hosts) -}}
{{- end -}}

{{/* The number of a group that has one; of a group that scales, that it does. */}}
{{- define "llm42.fixedSize" -}}
{{- if .autoscaling.enabled -}}scales{{- else -}}{{ .replicas }}{{- end -}}
{{- end -}}

{{/* Most pods of all groups of workers. */}}
{{- define "llm42.mostPods" -}}
{{- $fast := mul (include "llm42.range" .Values.fastPath | fromYaml).most .Values.fastPath.hosts -}}
{{- add $fast (ternary (include "llm42.range" .Values.verifier | fromYaml).most 0 .Values.verifier.dedicated) -}}
{{- end -}}

{{/*
Ingresses: one a fast-path pod, before any scaling. Serve's application runs once all of them have a place, so with
`verifier.ingress` a missing verifier pod holds best effort back too.
*/}}
{{- define "llm42.ingresses" -}}
{{- $fast := int (include "llm42.minPods" .Values.fastPath) -}}
{{- ternary (add $fast (int (include "llm42.minPods" .Values.verifier))) $fast (and .Values.verifier.dedicated .Values.verifier.ingress) -}}
{{- end -}}

{{/* For how long a replica that goes may finish its streams. */}}
{{- define "llm42.drainSeconds" -}}
{{- dig "server" "drain_s" 120 .Values.config | float64 | ceil | int -}}
{{- end -}}

{{- define "llm42.modelPath" -}}
{{- with .Values.model -}}
{{- if eq .source "image" -}}
{{ .path }}
{{- else if eq .source "huggingface" -}}
{{- /* a directory a commit: on a shared volume a new one must not change the files of the old */ -}}
{{ printf "/models/%s/%s" .huggingface.revision .path | trimSuffix "/" }}
{{- else -}}
{{ printf "/models/%s" .path | trimSuffix "/" }}
{{- end -}}
{{- end -}}
{{- end -}}
