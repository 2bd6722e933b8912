{{/* Where the model and the cache are kept, and how the model gets there. */}}

{{/* A volume source: the one of the values, else the chart's own claim, else a directory of the pod. */}}
{{- define "llm42.keptVolume" -}}
{{- if .values.volume -}}
{{- toYaml .values.volume -}}
{{- else if .values.claim.create -}}
persistentVolumeClaim: {claimName: {{ include "llm42.fullname" .root }}-{{ .what }}}
{{- else -}}
emptyDir: {}
{{- end -}}
{{- end -}}

{{- define "llm42.cacheVolume" -}}
{{- include "llm42.keptVolume" (dict "root" . "what" "cache" "values" .Values.cache) -}}
{{- end -}}

{{- define "llm42.modelVolume" -}}
{{- include "llm42.keptVolume" (dict "root" . "what" "model" "values" .Values.model.huggingface) -}}
{{- end -}}

{{/* What of `model` says which files are served; how they are fetched and kept is not in it. */}}
{{- define "llm42.modelIdentity" -}}
{{- with .Values.model -}}
{{- toJson (merge (pick . "source" "path" "pvc" "hostPath") (dict "huggingface" (pick .huggingface "repo" "revision" "allowPatterns"))) -}}
{{- end -}}
{{- end -}}

{{/* The init container: downloads the model, or waits until the Job has. */}}
{{- define "llm42.fetchContainer" -}}
{{- include "llm42.modelContainer" (dict "root" . "wait" .Values.model.huggingface.job.enabled) -}}
{{- end -}}

{{/*
Arguments: root, wait. What pods get from `common` to reach the world outside (proxies, certificates) the download gets, too; its
own variables win.
*/}}
{{- define "llm42.modelContainer" -}}
{{- $v := .root.Values -}}
{{- $h := $v.model.huggingface -}}
{{- $env := dict "HOME" (dict "name" "HOME" "value" "/home/llm42") -}}
{{- if not .wait -}}
{{- $_ := set $env "HF_XET_RECONSTRUCTION_DOWNLOAD_BUFFER_LIMIT" (dict "name" "HF_XET_RECONSTRUCTION_DOWNLOAD_BUFFER_LIMIT" "value" "1gb") -}}
{{- if $h.tokenSecret.name -}}
{{- $_ := set $env "HF_TOKEN" (dict "name" "HF_TOKEN" "valueFrom" (dict "secretKeyRef" (pick $h.tokenSecret "name" "key"))) -}}
{{- end -}}
{{- range $v.common.env -}}{{- $_ := set $env .name . -}}{{- end -}}
{{- /* offline is for what serves; TRANSFORMERS_OFFLINE counts where this one is empty */ -}}
{{- $_ := set $env "HF_HUB_OFFLINE" (dict "name" "HF_HUB_OFFLINE" "value" "0") -}}
{{- range $h.env -}}{{- $_ := set $env .name . -}}{{- end -}}
{{- end -}}
- name: {{ ternary "wait-for-model" "fetch-model" .wait }}
  image: {{ include "llm42.image" .root }}
  imagePullPolicy: {{ $v.image.pullPolicy }}
  securityContext:
    {{- toYaml $v.containerSecurityContext | nindent 4 }}
  command: [python3, /opt/llm42/scripts/fetch_model.py]
  args:
    - {{ $h.repo }}
    - --revision={{ $h.revision }}
    - --directory={{ printf "/models/%s" $h.revision }}
    {{- range $h.allowPatterns }}
    - {{ printf "--allow=%s" . | quote }}
    {{- end }}
    {{- if .wait }}
    - --wait
    {{- end }}
  env:
    {{- range $name := keys $env | sortAlpha }}
    - {{ toYaml (get $env $name) | nindent 6 | trim }}
    {{- end }}
  {{- with ternary list (concat $v.common.envFrom $h.envFrom) .wait }}
  envFrom:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  resources:
    {{- toYaml (ternary (dict "requests" (dict "cpu" "50m" "memory" "64Mi") "limits" (dict "cpu" "1" "memory" "512Mi")) $h.resources .wait) | nindent 4 }}
  volumeMounts:
    - {name: tmp, mountPath: /tmp}
    - {name: home, mountPath: /home/llm42}
    - {name: model, mountPath: /models{{ if .wait }}, readOnly: true{{ end }}}
    - {name: scripts, mountPath: /opt/llm42/scripts, readOnly: true}
    {{- if not .wait }}{{ with $v.common.volumeMounts }}{{ toYaml . | nindent 4 }}{{ end }}{{ end }}
{{- end -}}

{{- define "llm42.fetchPod" -}}
{{- $v := .Values -}}
metadata:
  labels:
    {{- include "llm42.podLabels" (dict "root" . "component" "fetch-model") | nindent 4 }}
    {{- with $v.common.labels }}{{ toYaml . | nindent 4 }}{{ end }}
spec:
  restartPolicy: OnFailure
  serviceAccountName: {{ include "llm42.serviceAccountName" . }}
  automountServiceAccountToken: false
  {{- with $v.image.pullSecrets }}
  imagePullSecrets:
    {{- range . }}
    - name: {{ . }}
    {{- end }}
  {{- end }}
  securityContext:
    {{- toYaml $v.podSecurityContext | nindent 4 }}
  {{- $role := include "llm42.role" (dict "root" . "values" (pick $v.model.huggingface.job "nodeSelector" "tolerations")) | fromYaml }}
  {{- with include "llm42.placement" (dict "root" . "role" $role "component" "fetch-model") | trim }}{{ . | nindent 2 }}{{ end }}
  containers:
    {{- include "llm42.modelContainer" (dict "root" . "wait" false) | nindent 4 }}
  volumes:
    - {name: tmp, emptyDir: {}}
    - {name: home, emptyDir: {}}
    - name: model
      {{- include "llm42.modelVolume" . | nindent 6 }}
    - name: scripts
      configMap: {name: {{ include "llm42.fullname" . }}-scripts}
    {{- with $v.common.volumes }}{{ toYaml . | nindent 4 }}{{ end }}
{{- end -}}
